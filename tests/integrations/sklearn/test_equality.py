"""A fit that was interrupted at every commit equals scikit-learn's uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import sklearn.cluster
import sklearn.mixture
from scipy import sparse

import everystep.integrations.sklearn as ours
from support.shelves.interrupted_fits import (
    assert_identical,
    assert_same_attributes,
    finish_interrupted,
    quietly,
)

SAMPLES, FEATURES = 240, 5
KINDS: dict[str, tuple[type, type]] = {
    "kmeans": (ours.KMeans, sklearn.cluster.KMeans),
    "minibatch": (ours.MiniBatchKMeans, sklearn.cluster.MiniBatchKMeans),
    "mixture": (ours.GaussianMixture, sklearn.mixture.GaussianMixture),
}


def blobs(dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(5)
    centers = generator.normal(size=(4, FEATURES)) * 1.5
    return (centers[generator.integers(0, 4, SAMPLES)] + generator.normal(size=(SAMPLES, FEATURES))).astype(
        dtype
    )


def first_rows(X: Any, n_clusters: int, random_state: Any) -> Any:
    return X[:n_clusters].toarray() if sparse.issparse(X) else X[:n_clusters].copy()


def weights() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).uniform(0.1, 3, SAMPLES)


def check(kind: str, tmp_path: Path, X: Any, every: int = 1, fit: Any = None, **parameters: Any) -> None:
    mine, theirs = KINDS[kind]
    fit = fit or {}
    expected = quietly(lambda: theirs(**parameters).fit(X.copy(), **fit))
    path = tmp_path / "fit.shelf"
    found, interruptions = finish_interrupted(
        lambda: mine(**parameters, shelf=path).fit(X.copy(), **fit), every
    )
    assert_same_attributes(found, expected)
    assert interruptions > 2
    again = quietly(lambda: mine(**parameters, shelf=str(path)).fit(X.copy(), **fit))
    assert_same_attributes(again, expected)


KMEANS = {
    "k-means++": {},
    "several runs": {"n_init": 4},
    "random": {"init": "random", "n_init": 3},
    "array": {"init": blobs()[:4].copy(), "n_init": 1},
    "callable": {"init": first_rows, "n_init": 1},
    "at the limit": {"max_iter": 3, "n_init": 2},
    "to the end": {"tol": 0.0},
    "one cluster": {"n_clusters": 1, "n_init": 4},
    "without a copy": {"copy_x": False},
}


def combined(cases: dict[str, Any], variants: tuple[str, ...], often: tuple[str, ...]) -> list[Any]:
    """All combinations; for most cases, all variants but the first are among the slow tests."""
    return [
        pytest.param(case, variant, marks=[] if case in often or variant == variants[0] else pytest.mark.slow)
        for case in cases
        for variant in variants
    ]


@pytest.mark.parametrize(("case", "algorithm"), combined(KMEANS, ("lloyd", "elkan"), ("several runs",)))
def test_kmeans_resumed_at_every_iteration(case: str, algorithm: str, tmp_path: Path) -> None:
    if case == "one cluster" and algorithm == "elkan":
        algorithm = "lloyd"  # scikit-learn warns, and does that
    usual = {"n_clusters": 4, "n_init": 1, "random_state": 3, "algorithm": algorithm}
    check("kmeans", tmp_path, blobs(), **{**usual, **KMEANS[case]})


@pytest.mark.parametrize("algorithm", ["lloyd", "elkan"])
@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_kmeans_of_weighted_dense_and_sparse_data(
    algorithm: str, form: str, dtype: Any, tmp_path: Path
) -> None:
    X: Any = blobs(dtype)
    if form == "sparse":
        X[np.abs(X) < 1] = 0
        X = sparse.csr_matrix(X)
    parameters = {"n_clusters": 5, "n_init": 2, "random_state": 0, "algorithm": algorithm}
    check("kmeans", tmp_path, X, fit={"sample_weight": weights()}, **parameters)


@pytest.mark.parametrize("algorithm", ["lloyd", "elkan"])
def test_kmeans_where_points_are_as_near_to_two_centers(algorithm: str, tmp_path: Path) -> None:
    """Elkan keeps such a point where it is, so what it has bounds for decides; new bounds would differ."""
    grid = np.stack(np.meshgrid(np.arange(16.0), np.arange(16.0)), -1).reshape(-1, 2)
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        parameters = {"n_clusters": 6, "init": "random", "n_init": 1, "random_state": seed, "tol": 0.0}
        check("kmeans", folder, grid, algorithm=algorithm, **parameters)


def test_kmeans_that_loses_clusters(tmp_path: Path) -> None:
    X = blobs()
    check("kmeans", tmp_path, X, n_clusters=4, n_init=1, init=np.vstack([X[:2], X[:2] + 1e3]))


MINIBATCH = {
    "usual": {},
    "several initializations": {"n_init": 3},
    "reassignments": {"n_clusters": 12, "reassignment_ratio": 0.5, "batch_size": 16, "max_iter": 2},
    "tolerance": {"tol": 0.05, "max_no_improvement": None, "max_iter": 5},
    "no labels": {"compute_labels": False},
    "to the limit": {"max_no_improvement": None, "max_iter": 3},
    "array": {"init": blobs()[:4].copy(), "n_init": 1},
}


@pytest.mark.parametrize(("case", "dtype"), combined(MINIBATCH, ("float64", "float32"), ("usual",)))
def test_minibatch_kmeans_resumed_at_every_step(case: str, dtype: str, tmp_path: Path) -> None:
    usual = {"n_clusters": 4, "n_init": 1, "batch_size": 30, "random_state": 7, "max_no_improvement": 5}
    check("minibatch", tmp_path, blobs(dtype), **{**usual, **MINIBATCH[case]})


def test_minibatch_kmeans_of_weighted_sparse_data(tmp_path: Path) -> None:
    X = sparse.csr_matrix(np.maximum(blobs(), 0))
    parameters = {"n_clusters": 4, "n_init": 2, "batch_size": 50, "random_state": 0}
    check("minibatch", tmp_path, X, fit={"sample_weight": weights()}, **parameters)


MIXTURE = {
    "usual": {},
    "several runs": {"n_init": 4},
    "random": {"init_params": "random", "n_init": 2},
    "from data": {"init_params": "random_from_data"},
    "k-means++": {"init_params": "k-means++", "n_init": 3},
    "at the limit": {"max_iter": 4, "n_init": 2},
    "means given": {"means_init": blobs()[:3].copy(), "weights_init": [0.2, 0.3, 0.5]},
}


@pytest.mark.parametrize(
    ("case", "covariance_type"), combined(MIXTURE, ("full", "tied", "diag", "spherical"), ("usual",))
)
def test_mixture_resumed_at_every_iteration(case: str, covariance_type: str, tmp_path: Path) -> None:
    usual = {"n_components": 3, "covariance_type": covariance_type, "random_state": 1, "max_iter": 20}
    every = 3 if case == "several runs" else 1
    check("mixture", tmp_path, blobs(), every=every, **{**usual, **MIXTURE[case]})


@pytest.mark.parametrize("covariance_type", ["full", "spherical"])
def test_mixture_with_given_precisions(covariance_type: str, tmp_path: Path) -> None:
    precisions = np.stack([np.eye(FEATURES) * (i + 1) for i in range(3)])
    given = precisions if covariance_type == "full" else np.arange(1.0, 4)
    parameters = {"n_components": 3, "random_state": 1, "n_init": 2, "max_iter": 10}
    check("mixture", tmp_path, blobs(), covariance_type=covariance_type, precisions_init=given, **parameters)


def test_mixture_of_single_precision(tmp_path: Path) -> None:
    check("mixture", tmp_path, blobs(np.float32), n_components=3, random_state=1, n_init=2)


def test_labels_of_a_mixture_that_was_interrupted_or_complete(tmp_path: Path) -> None:
    expected = sklearn.mixture.GaussianMixture(3, random_state=0).fit_predict(blobs())
    make = lambda: ours.GaussianMixture(3, random_state=0, shelf=tmp_path / "f").fit_predict(blobs())  # noqa: E731
    labels, interruptions = finish_interrupted(make)
    assert interruptions > 2
    assert_identical(labels, expected)
    assert_identical(make(), expected)


def test_warm_starts_of_a_mixture_resume_one_after_the_other(tmp_path: Path) -> None:
    def chain(kind: Any, **shelf: Any) -> Any:
        model = kind(3, warm_start=True, max_iter=2, random_state=0, **shelf)
        for _ in range(4):
            model.fit(blobs())
        return model

    expected = quietly(lambda: chain(sklearn.mixture.GaussianMixture))
    found, interruptions = finish_interrupted(
        lambda: chain(ours.GaussianMixture, shelf=str(tmp_path / "fits") + "/")
    )
    assert interruptions > 4
    assert_same_attributes(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_generator_ends_where_an_uninterrupted_fit_leaves_it(kind: str, tmp_path: Path) -> None:
    mine, theirs = KINDS[kind]
    size = {"n_components" if kind == "mixture" else "n_clusters": 3, "n_init": 3}
    uninterrupted = np.random.RandomState(4)
    expected = quietly(lambda: theirs(**size, random_state=uninterrupted).fit(blobs()))
    generators: list[np.random.RandomState] = []

    def fit() -> Any:
        generators.append(np.random.RandomState(4))
        return mine(**size, random_state=generators[-1], shelf=tmp_path / "fit.shelf").fit(blobs())

    for _ in range(2):  # interrupted, and complete
        found, _ = finish_interrupted(fit, every=2)
        assert_same_attributes(found, expected)
        assert_identical(generators[-1], uninterrupted)


def test_without_a_seed_numpys_global_generator_is_not_set(tmp_path: Path) -> None:
    found, interruptions = finish_interrupted(
        lambda: ours.MiniBatchKMeans(4, n_init=1, batch_size=40, shelf=tmp_path / "f").fit(blobs())
    )
    assert interruptions > 2
    assert np.isfinite(found.cluster_centers_).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_shelf_the_estimators_are_scikit_learns(kind: str) -> None:
    mine, theirs = KINDS[kind]
    size = {"n_components" if kind == "mixture" else "n_clusters": 3}
    found = quietly(lambda: mine(**size, random_state=0).fit(blobs()))
    assert_same_attributes(found, quietly(lambda: theirs(**size, random_state=0).fit(blobs())))
