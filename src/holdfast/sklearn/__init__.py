"""scikit-learn estimators whose fits survive a crash: their state lives on a `holdfast.Shelf`.

    from holdfast.sklearn import KMeans

    KMeans(10, random_state=0, shelf="fit.shelf").fit(X)     # after a crash, the same line goes on

`KMeans`, `MiniBatchKMeans` and `GaussianMixture` are scikit-learn's own, with one more parameter. `stream`
does the same for every estimator with ``partial_fit``. Names, and scikit-learn, are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.sklearn.kmeans import KMeans as KMeans
    from holdfast.sklearn.minibatch import MiniBatchKMeans as MiniBatchKMeans
    from holdfast.sklearn.mixture import GaussianMixture as GaussianMixture
    from holdfast.sklearn.streams import stream as stream

_HOME_OF = {
    "KMeans": "holdfast.sklearn.kmeans",
    "MiniBatchKMeans": "holdfast.sklearn.minibatch",
    "GaussianMixture": "holdfast.sklearn.mixture",
    "stream": "holdfast.sklearn.streams",
}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOME_OF:
        raise AttributeError(f"module 'holdfast.sklearn' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
