"""KMeans that goes on after a crash.

What is stored: at the start of every iteration its centers, in the older of two places. So the shelf
holds the centers of this iteration and of the one before it. To go on, scikit-learn's loop starts at the one
before: its labels follow from its centers, and its result is stored. A checkpoint is as small as the centers.
Elkan's bounds depend on all iterations before, so ``algorithm="elkan"`` stores them, too.
When a run is complete and others follow (``n_init``), its result is kept: scikit-learn then picks the best.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import _fit_context
from sklearn.cluster import _kmeans
from threadpoolctl import threadpool_limits

from everystep.integrations.sklearn.base import SHELF_CONSTRAINT, FitProgress, Resumable
from everystep.integrations.sklearn.fingerprints import describe
from everystep.integrations.sklearn.loops import with_names
from everystep.integrations.sklearn.record import ShelfLike

_DEFAULT_N_INIT: Any = _kmeans.KMeans().n_init  # it differs between versions
_SLOTS = ("centers.0", "centers.1")
_BOUNDS = ("labels", "upper_bounds", "lower_bounds")
_RESULT = ("labels", "inertia", "centers", "n_iter")


class KMeans(Resumable, _kmeans.KMeans):  # type: ignore[misc]
    """scikit-learn's `KMeans`, with one more parameter.

    ``fit`` with the same data and parameters goes on where the last one ended, or returns the stored result
    if that was complete.

    Args:
        shelf: Where each iteration is made durable: the path of a shelf file, a directory (one shelf file for
            each fit), or an open `everystep.Shelf`. None: this is scikit-learn's estimator.

    All other parameters are those of scikit-learn's `KMeans`.

    >>> import tempfile, numpy as np, sklearn.cluster
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ours = KMeans(3, n_init=2, random_state=0, shelf=folder + "/fit.shelf").fit(X)
    >>> theirs = sklearn.cluster.KMeans(3, n_init=2, random_state=0).fit(X)
    >>> bool((ours.cluster_centers_ == theirs.cluster_centers_).all())
    True
    """

    _parameter_constraints = {**_kmeans.KMeans._parameter_constraints, **SHELF_CONSTRAINT}  # noqa: RUF012

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: Any = _DEFAULT_N_INIT,
        max_iter: int = 300,
        tol: float = 1e-4,
        verbose: int = 0,
        random_state: Any = None,
        copy_x: bool = True,
        algorithm: str = "lloyd",
        shelf: ShelfLike = None,
    ) -> None:
        super().__init__(
            n_clusters,
            init=init,
            n_init=n_init,
            max_iter=max_iter,
            tol=tol,
            verbose=verbose,
            random_state=random_state,
            copy_x=copy_x,
            algorithm=algorithm,
        )
        self.shelf = shelf

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KMeans:
        """Computes the clustering, from where the shelf says. See scikit-learn's `KMeans.fit`."""
        if self.shelf is None:
            return super().fit(X, y, sample_weight)  # type: ignore[no-any-return]
        runs = _Runs(self, {"sample_weight": describe(sample_weight)})
        body = with_names(_kmeans.KMeans.fit, runs.names())
        fit = _fit_context(prefer_skip_nested_validation=True)(body)
        self._fit_on_shelf(runs, lambda: fit(self, X, y, sample_weight))
        return self

    def _check_params_vs_input(self, X: Any) -> None:
        super()._check_params_vs_input(X)
        if self._everystep_fit is not None:
            centers = self.n_clusters * X.shape[1] * X.dtype.itemsize
            labels = 8 * X.shape[0] * self._n_init
            bounds = X.shape[0] * (self.n_clusters + 2) * X.dtype.itemsize
            nbytes = centers * (self._n_init + 3) + labels + bounds * (self._algorithm == "elkan")
            self._everystep_fit.begin(X, nbytes)

    def _init_centroids(self, X: Any, *args: Any, random_state: Any, **options: Any) -> Any:
        compute = partial(super()._init_centroids, X, *args, random_state=random_state, **options)
        if not isinstance(self._everystep_fit, _Runs):
            return compute()
        return self._everystep_fit.initial_centers(X, compute, random_state)


class _Runs(FitProgress):
    """The runs of one fit (``n_init``) and the iterations of each: what scikit-learn's loops meet."""

    run = -1
    iteration = 0
    random_state: np.random.RandomState
    stored_run: int
    stored_iteration: Any  # None: the run has not begun

    def begin(self, X: Any, nbytes: int) -> None:
        super().begin(X, nbytes)
        self.stored_run, self.stored_iteration = self.record.get("place") or (0, None)

    def names(self) -> dict[str, object]:
        """For `KMeans.fit`: the single runs."""
        return {
            "_kmeans_single_lloyd": partial(self.single, _kmeans._kmeans_single_lloyd, self.lloyd, 1),
            "_kmeans_single_elkan": partial(self.single, _kmeans._kmeans_single_elkan, self.elkan, None),
        }

    @property
    def goes_on(self) -> bool:
        """Whether the shelf holds an iteration of this run."""
        return self.run == self.stored_run and self.stored_iteration is not None

    def initial_centers(self, X: Any, compute: Callable[[], Any], random_state: Any) -> Any:
        """The initial centers of the next run, or those with which its loop goes on."""
        self.run += 1
        self.random_state = random_state
        if self.run < self.stored_run:  # its result is stored
            return np.empty((self.estimator.n_clusters, X.shape[1]), X.dtype)
        if self.run == self.stored_run:
            self.set_random_state(random_state)
        if not self.goes_on:
            return compute()
        return self.record.copy(_SLOTS[max(0, self.stored_iteration - 1) % 2])

    def single(
        self, function: Any, kernel: Any, blas_threads: int | None, X: Any, *args: Any, **options: Any
    ) -> Any:
        """One run, by scikit-learn's function of that name; the stored result, if it is complete."""
        if self.run < self.stored_run:
            labels, inertia, centers, n_iter = (self.record.get(f"run.{self.run}.{name}") for name in _RESULT)
            return np.array(labels), inertia, np.array(centers), n_iter
        form = "sparse" if sparse.issparse(X) else "dense"
        name = f"{kernel.__name__}_iter_chunked_{form}"
        names = {"range": self.first_iteration, name: partial(kernel, getattr(_kmeans, name))}
        if kernel.__name__ == "elkan" and self.goes_on and self.stored_iteration > 0:
            names[f"init_bounds_{form}"] = _nothing  # the bounds are stored
        loop = with_names(function, names)
        with threadpool_limits(limits=blas_threads, user_api="blas"):  # as scikit-learn's decorator does
            result = loop(X, *args, **options)
        if self.run + 1 < self.estimator._n_init:
            found = {f"run.{self.run}.{name}": value for name, value in zip(_RESULT, result, strict=True)}
            self.record.commit({**found, "place": (self.run + 1, None)}, remove=[*_SLOTS, *_BOUNDS])
        return result

    def first_iteration(self, count: int) -> range:
        """The `range` of the loop: starts one before the stored iteration, whose result is known."""
        self.iteration = max(0, self.stored_iteration - 1) if self.goes_on else 0
        return range(self.iteration, count)

    @property
    def known(self) -> bool:
        """Whether the result of the loop's present iteration is on the shelf."""
        return self.goes_on and self.iteration < self.stored_iteration

    def lloyd(self, kernel: Any, *args: Any, update_centers: bool = True) -> None:
        if not update_centers:
            kernel(*args, update_centers=False)
            return
        _, _, centers, centers_new, _, _, center_shift, _ = args
        if self.known:
            kernel(*args, update_centers=False)  # the labels
            self.answer(centers_new, center_shift)
        else:
            self.commit(centers, {})
            kernel(*args)
        self.iteration += 1

    def elkan(self, kernel: Any, *args: Any, update_centers: bool = True) -> None:
        if not update_centers:
            kernel(*args, update_centers=False)
            return
        _, _, centers, centers_new, _, _, _, upper_bounds, lower_bounds, labels, center_shift, _ = args
        bounds = dict(zip(_BOUNDS, (labels, upper_bounds, lower_bounds), strict=True))
        if self.known:
            for name, memory in bounds.items():
                np.copyto(memory, self.record.get(name))
            self.answer(centers_new, center_shift)
        else:
            self.commit(centers, bounds)
            kernel(*args)
        self.iteration += 1

    def answer(self, centers_new: Any, center_shift: Any) -> None:
        """The result of an iteration that was complete, and not the last: no shift is small enough to end."""
        np.copyto(centers_new, self.record.get(_SLOTS[self.stored_iteration % 2]))
        center_shift[:] = np.inf

    def commit(self, centers: Any, bounds: dict[str, Any]) -> None:
        """All iterations before this one are complete, and none of them was the last."""
        if self.goes_on and self.iteration == self.stored_iteration:
            return
        changes = {_SLOTS[self.iteration % 2]: centers, "place": (self.run, self.iteration), **bounds}
        if self.iteration == 0:
            changes |= self.random_entries(self.random_state)
        self.record.commit_soon(changes)


def _nothing(*args: Any, **options: Any) -> None:
    pass
