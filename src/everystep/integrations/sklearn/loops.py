"""The way into scikit-learn's iterations: its own functions, run with a few names of ours in their globals.

Why this way: `KMeans.fit` and `MiniBatchKMeans.fit` loop inside private functions that call nothing that a
subclass could override. A copy of these loops would follow one version of scikit-learn and repeat its
decisions (which run is best, when to stop). Calling ``fit`` with ``max_iter=1`` again and again copies and
centers the data each time and forgets the labels of the iteration before. So the code objects of scikit-learn
run unchanged, as functions whose globals are a copy of their module's with other `range` and kernels.
scikit-learn's modules are never changed: other fits, also in other threads, do not notice.
`GaussianMixture` needs none of this: everything it calls is a method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from everystep.errors import UnsupportedVersion
from everystep.integrations.sklearn.versions import VERSION


def with_names(function: Callable[..., Any], names: Mapping[str, object]) -> Callable[..., Any]:
    """A function with the code of `function`, without its decorators, that finds `names` as its globals."""
    bare = inspect.unwrap(function)
    home = str(getattr(bare, "__module__", None))
    if home.partition(".")[0] != "sklearn":
        raise UnsupportedVersion(
            f"{getattr(bare, '__qualname__', bare)} of {home} has taken the place of a part of scikit-learn, "
            "whose own code everystep.integrations.sklearn needs. Undo that (a patch such as sklearnex's), "
            "and import everystep.integrations.sklearn again"
        )
    if not isinstance(bare, FunctionType) or (missing := set(names) - set(bare.__code__.co_names)):
        raise UnsupportedVersion(
            f"scikit-learn {VERSION}: {getattr(bare, '__qualname__', bare)} does not use "
            f"{', '.join(sorted(missing)) if isinstance(bare, FunctionType) else 'Python code'}; "
            "everystep.integrations.sklearn does not know this version"
        )
    other = FunctionType(
        bare.__code__, {**bare.__globals__, **names}, bare.__name__, bare.__defaults__, bare.__closure__
    )
    other.__kwdefaults__ = bare.__kwdefaults__
    return other
