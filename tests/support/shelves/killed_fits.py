"""A program that kills its fits with SIGKILL and starts them again until one is complete.

    python -m support.shelves.killed_fits KIND SHELF RESULT SEED KILLS

It imports scikit-learn once and forks for every attempt, so that a kill costs milliseconds. Attempts are
killed in turn before a commit, at a random moment from outside, and after a commit. The attributes of the
last one go to RESULT, a ``.npz`` file. It prints the number of kills.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from typing import Any

import numpy as np

SAMPLES = 250
KINDS = ("kmeans", "elkan", "minibatch", "mixture", "stream")


def data() -> np.ndarray[Any, Any]:
    return np.random.default_rng(8).normal(size=(SAMPLES, 6))


def batches() -> list[np.ndarray[Any, Any]]:
    return list(np.split(data(), 25))


def make(kind: str, **shelf: Any) -> Any:
    """Without a shelf, scikit-learn's own estimator."""
    import sklearn.cluster
    import sklearn.mixture

    import everystep.integrations.sklearn

    cluster: Any = everystep.integrations.sklearn if shelf else sklearn.cluster
    mixture: Any = everystep.integrations.sklearn if shelf else sklearn.mixture
    if kind in ("kmeans", "elkan"):
        algorithm = "elkan" if kind == "elkan" else "lloyd"
        return cluster.KMeans(5, n_init=3, random_state=1, tol=0.0, algorithm=algorithm, **shelf)
    if kind == "minibatch":
        steps = {"max_no_improvement": None, "max_iter": 6}
        return cluster.MiniBatchKMeans(5, n_init=1, batch_size=32, random_state=1, **steps, **shelf)
    return mixture.GaussianMixture(4, n_init=3, tol=1e-4, max_iter=25, random_state=1, **shelf)


def fit(kind: str, shelf: str | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "stream":
            import sklearn.cluster

            from everystep.integrations.sklearn import stream

            model = sklearn.cluster.MiniBatchKMeans(5, n_init=1, random_state=1)
            if shelf is not None:
                return stream(model, batches(), shelf=shelf)
            for batch in batches():
                model.partial_fit(batch)
            return model
        return make(kind, **({"shelf": shelf} if shelf else {})).fit(data())


def public_attributes(model: Any) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in vars(model).items() if name.endswith("_")}


def _kill_at(commit: int, before: bool) -> None:
    from everystep.integrations.sklearn.record import FitRecord

    original, count = FitRecord._commit, [0]

    def counted(self: FitRecord, *args: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == commit and before:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *args, **options)
        if count[0] == commit:
            os.kill(os.getpid(), signal.SIGKILL)

    FitRecord._commit = counted  # type: ignore[method-assign]


def main(kind: str, shelf: str, result: str, seed: str, kills: str) -> None:
    from everystep.integrations.sklearn import GaussianMixture, KMeans, MiniBatchKMeans, stream

    _ = KMeans, MiniBatchKMeans, GaussianMixture, stream
    generator = random.Random(int(seed))
    for attempt in range(10_000):
        way = ("before", "inside", "after")[attempt % 3] if attempt < int(kills) else "none"
        child = os.fork()
        if child == 0:
            if way in ("before", "after"):
                _kill_at(generator.randrange(1, 4), way == "before")
            model = fit(kind, shelf)
            np.savez(result, **public_attributes(model))
            os._exit(0)
        if way == "inside":
            time.sleep(generator.uniform(0.0, 0.03))
            os.kill(child, signal.SIGKILL)
        generator.random()
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                sys.exit(1)
            print(attempt)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
