"""GaussianMixture that goes on after a crash.

What is stored, after every iteration: weights, means, covariances, and the lower bounds of all iterations. To
go on, scikit-learn's loop runs from its start, and every complete step is answered from the shelf: the bounds
one by one, so that scikit-learn decides again what it has decided before; the parameters once. The
Cholesky factors of the precisions follow from the covariances and are computed again. With ``n_init``, the
parameters of the best run so far are kept beside those of the present one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.mixture import _gaussian_mixture

from everystep.integrations.sklearn.base import (
    SHELF_CONSTRAINT,
    FitProgress,
    Resumable,
    number_again,
    number_entry,
)
from everystep.integrations.sklearn.fingerprints import describe, of_text
from everystep.integrations.sklearn.record import ShelfLike

_PARAMETERS = ("weights_", "means_", "covariances_")
_CHOLESKY = "precisions_cholesky_"


class GaussianMixture(Resumable, _gaussian_mixture.GaussianMixture):  # type: ignore[misc]
    """scikit-learn's `GaussianMixture`, with one more parameter.

    Args:
        shelf: Where each iteration is made durable, as for `KMeans`. With ``warm_start``, give a directory:
            each call of ``fit`` is a fit of its own.

    All other parameters are those of scikit-learn's `GaussianMixture`.
    """

    _parameter_constraints = {  # noqa: RUF012
        **_gaussian_mixture.GaussianMixture._parameter_constraints,
        **SHELF_CONSTRAINT,
    }

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weights_init: Any = None,
        means_init: Any = None,
        precisions_init: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
        verbose_interval: int = 10,
        shelf: ShelfLike = None,
    ) -> None:
        super().__init__(
            n_components,
            covariance_type=covariance_type,
            tol=tol,
            reg_covar=reg_covar,
            max_iter=max_iter,
            n_init=n_init,
            init_params=init_params,
            weights_init=weights_init,
            means_init=means_init,
            precisions_init=precisions_init,
            random_state=random_state,
            warm_start=warm_start,
            verbose=verbose,
            verbose_interval=verbose_interval,
        )
        self.shelf = shelf

    def fit_predict(self, X: Any, y: Any = None) -> Any:
        """Fits, from where the shelf says, and returns the labels. See scikit-learn's method."""
        if self.shelf is None:
            return super().fit_predict(X, y)
        start = "none"
        if self.warm_start and hasattr(self, "converged_"):
            held = [getattr(self, name) for name in (*_PARAMETERS, _CHOLESKY)]
            start = of_text(" ".join([*map(describe, held), repr(float(self.lower_bound_))]))
        runs = _Runs(self, {"start": start}, warm=start != "none")
        return self._fit_on_shelf(runs, lambda: super(GaussianMixture, self).fit_predict(X, y))

    def _check_parameters(self, X: Any, **options: Any) -> None:
        super()._check_parameters(X, **options)
        if self._everystep_fit is not None:
            n, d = self.n_components, X.shape[1]
            shapes = {"full": n * d * d, "tied": d * d, "diag": n * d, "spherical": n}
            nbytes = X.dtype.itemsize * (n + n * d + 2 * shapes[self.covariance_type])
            self._everystep_fit.begin(X, 2 * nbytes + 8 * X.shape[0])

    def _initialize_parameters(self, X: Any, random_state: Any, **options: Any) -> None:
        runs = self._everystep_fit
        if not isinstance(runs, _Runs):
            super()._initialize_parameters(X, random_state, **options)
        elif not runs.next_run(random_state):
            super()._initialize_parameters(X, random_state, **options)
            runs.commit([], initial=True)

    def _e_step(self, X: Any, **options: Any) -> Any:
        if isinstance(self._everystep_fit, _Runs) and self._everystep_fit.answers():
            return None, None
        return super()._e_step(X, **options)

    def _m_step(self, X: Any, log_resp: Any, **options: Any) -> None:
        if log_resp is not None:
            super()._m_step(X, log_resp, **options)

    def _compute_lower_bound(self, log_resp: Any, log_prob_norm: Any) -> Any:
        runs = self._everystep_fit
        if not isinstance(runs, _Runs):
            return super()._compute_lower_bound(log_resp, log_prob_norm)
        if log_prob_norm is None:
            return runs.next_bound()
        bound = super()._compute_lower_bound(log_resp, log_prob_norm)
        runs.bounds.append(bound)
        runs.commit(runs.bounds)
        return bound

    def _get_parameters(self) -> Any:
        """scikit-learn asks for these when a run is complete and better than those before."""
        if isinstance(self._everystep_fit, _Runs):
            self._everystep_fit.best()
        return super()._get_parameters()


class _Runs(FitProgress):
    """The runs of one fit (``n_init``), and what is answered from the shelf.

    Stored are `bounds`: for each complete run and the present one the lower bounds of its iterations; the
    parameters of the present run (``weights_`` …), and of the best one before it (``best.weights_`` …).
    """

    def __init__(self, estimator: Any, also: dict[str, str], warm: bool) -> None:
        super().__init__(estimator, also)
        self.run = 0 if warm else -1
        self.iteration = 0
        self.random_state: Any = None
        self.bounds: list[Any] = []
        """Those of the present run, from its first iteration on."""
        self.stored: list[list[Any]] = []

    def begin(self, X: Any, nbytes: int) -> None:
        super().begin(X, nbytes)
        found = self.record.get("bounds")
        self.stored = [] if found is None else [list(run) for run in found]
        if self.run == 0:
            self.enter()

    def next_run(self, random_state: Any) -> bool:
        """Goes to the next run; True if it was already initialized."""
        self.run, self.iteration, self.bounds = self.run + 1, 0, []
        self.random_state = random_state
        if self.run == len(self.stored) - 1:
            self.set_random_state(random_state)
        return self.enter()

    def enter(self) -> bool:
        if self.run >= len(self.stored):
            return False
        if self.run == len(self.stored) - 1:
            self.bounds = [number_again(entry) for entry in self.stored[-1]]
            self.take("")
        else:  # complete; if it is not the best, scikit-learn passes over these parameters
            self.take("best.")
        return True

    def answers(self) -> bool:
        """Whether the shelf has the result of the present iteration."""
        return self.run < len(self.stored) and self.iteration < len(self.stored[self.run])

    def next_bound(self) -> Any:
        self.iteration += 1
        return number_again(self.stored[self.run][self.iteration - 1])

    def take(self, prefix: str) -> None:
        """Sets the estimator's parameters to stored ones."""
        estimator = self.estimator
        for name in _PARAMETERS:
            if self.record.get(prefix + name) is not None:
                setattr(estimator, name, self.record.copy(prefix + name))
        if self.record.get(prefix + _CHOLESKY) is not None:
            estimator.precisions_cholesky_ = self.record.copy(prefix + _CHOLESKY)
        else:
            estimator.precisions_cholesky_ = _gaussian_mixture._compute_precision_cholesky(
                estimator.covariances_, estimator.covariance_type
            )

    def commit(self, bounds: list[Any], initial: bool = False) -> None:
        """The present run has these iterations; its parameters are the estimator's."""
        self.stored = [*self.stored[: self.run], [number_entry(bound) for bound in bounds]]
        self.iteration = len(bounds)
        # From initial precisions of the user no covariances follow; otherwise the factors are computed again.
        given = initial and self.estimator.precisions_init is not None
        names = (*_PARAMETERS, _CHOLESKY) if given else _PARAMETERS
        held = {name: getattr(self.estimator, name, None) for name in names}
        changes = {name: np.asarray(value) for name, value in held.items() if value is not None}
        if initial and self.random_state is not None:
            changes |= self.random_entries(self.random_state)
        self.record.commit({"bounds": self.stored, **changes}, remove=() if initial else (_CHOLESKY,))

    def best(self) -> None:
        """Keeps the present run's parameters, if others follow and this is not a repetition."""
        present = self.run >= len(self.stored) - 1
        if present and self.run + 1 < self.estimator.n_init and self.record.get("best") != self.run:
            names = [name for name in (*_PARAMETERS, _CHOLESKY) if self.record.get(name) is not None]
            gone = {"best." + name for name in (*_PARAMETERS, _CHOLESKY)} - {"best." + n for n in names}
            self.record.commit(
                {"best": self.run, **{"best." + name: self.record.copy(name) for name in names}}, remove=gone
            )
