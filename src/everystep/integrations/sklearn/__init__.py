"""scikit-learn estimators whose fits survive a crash: their state lives on an `everystep.Shelf`.

    from everystep.integrations.sklearn import KMeans

    KMeans(10, random_state=0, shelf="fit.shelf").fit(X)     # after a crash, the same line goes on

`KMeans`, `MiniBatchKMeans` and `GaussianMixture` are scikit-learn's own, with one more parameter. `stream`
does the same for every estimator with ``partial_fit``. Names, and scikit-learn, are imported on first use.

| module | what it owns |
|---|---|
| `kmeans`, `minibatch`, `mixture` | the estimators: what a fit stores, and where it goes on |
| `streams` | `stream`: batches by ``partial_fit`` |
| `base` | what the estimators share: the parameter `shelf`, and the stored result |
| `record` | one fit on a shelf: which fit it is, and its commits |
| `estimator_state` | attributes of an estimator to arrays and plain values, and back |
| `fingerprints` | data and parameters as text that identifies a fit |
| `loops` | the way into scikit-learn's iterations |
| `versions` | the supported versions of scikit-learn |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everystep.integrations.shared.frameworks import names_on_first_use

if TYPE_CHECKING:
    from everystep.integrations.sklearn.kmeans import KMeans as KMeans
    from everystep.integrations.sklearn.minibatch import MiniBatchKMeans as MiniBatchKMeans
    from everystep.integrations.sklearn.mixture import GaussianMixture as GaussianMixture
    from everystep.integrations.sklearn.streams import stream as stream

_HOME_OF = {
    "KMeans": "kmeans",
    "MiniBatchKMeans": "minibatch",
    "GaussianMixture": "mixture",
    "stream": "streams",
}
__all__ = sorted(_HOME_OF)
__getattr__ = names_on_first_use(__name__, _HOME_OF)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
