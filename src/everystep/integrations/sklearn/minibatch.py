"""MiniBatchKMeans that goes on after a crash.

What is stored, after every step: the centers, their weights, the counters of early stopping and reassignment,
and the random state. To go on, scikit-learn's loop starts at the next step with these.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sklearn.base import _fit_context
from sklearn.cluster import _kmeans

from everystep.integrations.sklearn.base import (
    SHELF_CONSTRAINT,
    FitProgress,
    Resumable,
    number_again,
    number_entry,
)
from everystep.integrations.sklearn.fingerprints import describe
from everystep.integrations.sklearn.loops import with_names
from everystep.integrations.sklearn.record import ShelfLike

_DEFAULT_N_INIT: Any = _kmeans.MiniBatchKMeans().n_init
_COUNTERS = ("_ewa_inertia", "_ewa_inertia_min", "_no_improvement", "_n_since_last_reassign")


class MiniBatchKMeans(Resumable, _kmeans.MiniBatchKMeans):  # type: ignore[misc]
    """scikit-learn's `MiniBatchKMeans`, with one more parameter.

    ``partial_fit`` needs ``shelf=None``: only `integrations.sklearn.stream` knows which batch comes next.

    Args:
        shelf: Where each step is made durable, as for `KMeans`.

    All other parameters are those of scikit-learn's `MiniBatchKMeans`.
    """

    _parameter_constraints = {  # noqa: RUF012
        **_kmeans.MiniBatchKMeans._parameter_constraints,
        **SHELF_CONSTRAINT,
    }

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        max_iter: int = 100,
        batch_size: int = 1024,
        verbose: int = 0,
        compute_labels: bool = True,
        random_state: Any = None,
        tol: float = 0.0,
        max_no_improvement: int | None = 10,
        init_size: int | None = None,
        n_init: Any = _DEFAULT_N_INIT,
        reassignment_ratio: float = 0.01,
        shelf: ShelfLike = None,
    ) -> None:
        super().__init__(
            n_clusters,
            init=init,
            max_iter=max_iter,
            batch_size=batch_size,
            verbose=verbose,
            compute_labels=compute_labels,
            random_state=random_state,
            tol=tol,
            max_no_improvement=max_no_improvement,
            init_size=init_size,
            n_init=n_init,
            reassignment_ratio=reassignment_ratio,
        )
        self.shelf = shelf

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> MiniBatchKMeans:
        """Computes the centers, from where the shelf says. See scikit-learn's `MiniBatchKMeans.fit`."""
        if self.shelf is None:
            return super().fit(X, y, sample_weight)  # type: ignore[no-any-return]
        steps = _Steps(self, {"sample_weight": describe(sample_weight)})
        names = {"range": steps.first_step, "_mini_batch_step": steps.step}
        body = with_names(_kmeans.MiniBatchKMeans.fit, names)
        fit = _fit_context(prefer_skip_nested_validation=True)(body)
        self._fit_on_shelf(steps, lambda: fit(self, X, y, sample_weight))
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> MiniBatchKMeans:
        """One step with one batch, as scikit-learn does it; only without a shelf."""
        if self.shelf is not None:
            raise ValueError(
                "partial_fit would not be on the shelf: a shelf cannot know which batch is next. Use "
                "everystep.integrations.sklearn.stream(estimator, batches, shelf=...), or "
                "set_params(shelf=None)."
            )
        return super().partial_fit(X, y, sample_weight)  # type: ignore[no-any-return]

    def _check_params_vs_input(self, X: Any) -> None:
        super()._check_params_vs_input(X)
        if self._everystep_fit is not None:
            centers = (self.n_clusters + 1) * X.shape[1] * X.dtype.itemsize
            self._everystep_fit.begin(X, 2 * centers + 8 * X.shape[0])

    def _init_centroids(self, X: Any, *args: Any, random_state: Any, **options: Any) -> Any:
        compute = partial(super()._init_centroids, X, *args, random_state=random_state, **options)
        if not isinstance(self._everystep_fit, _Steps):
            return compute()
        return self._everystep_fit.initial_centers(compute, random_state)

    def _mini_batch_convergence(self, step: int, n_steps: int, *args: Any) -> bool:
        ends: bool = super()._mini_batch_convergence(step, n_steps, *args)
        if isinstance(self._everystep_fit, _Steps) and not ends and step + 1 < n_steps:
            self._everystep_fit.commit(step + 1)
        return ends


class _Steps(FitProgress):
    """The steps of one fit: what scikit-learn's loop meets."""

    initialized = False
    random_state: Any
    centers: Any

    def initial_centers(self, compute: Any, random_state: Any) -> Any:
        self.initialized, self.random_state = True, random_state
        return compute() if self.record.get("step") is None else self.record.copy("centers")

    def first_step(self, count: int) -> range:
        """The `range` of two loops: first over the initializations, then over the steps."""
        step = self.record.get("step")
        if not self.initialized or step is None:
            return range(count)
        self.set_random_state(self.random_state)
        self.estimator._counts[:] = self.record.get("counts")
        for name, entry in zip(_COUNTERS, self.record.get("counters"), strict=True):
            setattr(self.estimator, name, number_again(entry))
        return range(step, count)

    def step(self, **options: Any) -> Any:
        self.centers = options["centers_new"]
        return _kmeans._mini_batch_step(**options)

    def commit(self, step: int) -> None:
        """So many steps are complete, and none of them was the last."""
        counters = [getattr(self.estimator, name) for name in _COUNTERS]
        self.record.commit_soon(
            {
                "step": step,
                "centers": self.centers,
                "counts": self.estimator._counts,
                "counters": [number_entry(value) for value in counters],
                **self.random_entries(self.random_state),
            }
        )
