"""scikit-learn estimators whose fits survive a crash: their state lives on an `everystep.Shelf`.

    from everystep.sklearn import KMeans

    KMeans(10, random_state=0, shelf="fit.shelf").fit(X)     # after a crash, the same line goes on

`KMeans`, `MiniBatchKMeans` and `GaussianMixture` are scikit-learn's own, with one more parameter. `stream`
does the same for every estimator with ``partial_fit``. Names, and scikit-learn, are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everystep.sklearn.kmeans import KMeans as KMeans
    from everystep.sklearn.minibatch import MiniBatchKMeans as MiniBatchKMeans
    from everystep.sklearn.mixture import GaussianMixture as GaussianMixture
    from everystep.sklearn.streams import stream as stream

_HOME_OF = {
    "KMeans": "everystep.sklearn.kmeans",
    "MiniBatchKMeans": "everystep.sklearn.minibatch",
    "GaussianMixture": "everystep.sklearn.mixture",
    "stream": "everystep.sklearn.streams",
}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOME_OF:
        raise AttributeError(f"module 'everystep.sklearn' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
