"""What users of scikit-learn expect of an estimator, and of one that keeps its fits."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import sklearn
import sklearn.cluster
import sklearn.mixture
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import everystep
import everystep.integrations.sklearn as ours
from everystep.integrations.sklearn import loops, versions
from support.shelves.interrupted_fits import Interruption, assert_same_attributes, ends_at, finish_interrupted

X = np.random.default_rng(0).normal(size=(120, 4))
KINDS: list[Any] = [ours.KMeans, ours.MiniBatchKMeans, ours.GaussianMixture]


def test_a_complete_fit_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fit.shelf"
    first = ours.KMeans(3, random_state=0, n_init=2, shelf=path).fit(X)
    monkeypatch.setattr(sklearn.cluster.KMeans, "_init_centroids", lambda *a, **o: pytest.fail("computes"))
    again = ours.KMeans(3, random_state=0, n_init=2, verbose=0, copy_x=True, shelf=str(path)).fit(X)
    assert_same_attributes(again, first)
    assert np.array_equal(again.predict(X), first.labels_)


@pytest.mark.parametrize("state", ["interrupted", "complete"])
@pytest.mark.parametrize(
    ("change", "data", "fit", "named"),
    [
        ({"n_clusters": 4}, X, {}, "n_clusters is 3 there and 4 here"),
        ({"random_state": 1}, X, {}, "random_state is 0 there and 1 here"),
        ({"init": X[:3].copy(), "n_init": 1}, X, {}, "init is 'k-means\\+\\+' there and float64 3x4"),
        ({}, X + 1e-9, {}, "data is float64 120x4 [0-9a-f]{16} there and float64 120x4"),
        ({}, X.astype(np.float32), {}, "data is float64 .* and float32 120x4"),
        ({}, X, {"sample_weight": np.arange(120.0)}, "sample_weight is none there and float64 120 "),
    ],
)
def test_another_fit_is_refused_with_both_fingerprints(
    tmp_path: Path, state: str, change: dict[str, Any], data: Any, fit: Any, named: str
) -> None:
    path = tmp_path / "fit.shelf"
    usual = {"n_clusters": 3, "n_init": 2, "random_state": 0, "shelf": path}
    if state == "complete":
        ours.KMeans(**usual).fit(X)
    else:
        with pytest.raises(Interruption), ends_at(4, before=False):
            ours.KMeans(**usual).fit(X)
    before = path.read_bytes()
    with pytest.raises(everystep.StateMismatch, match=named) as error:
        ours.KMeans(**{**usual, **change}).fit(data, **fit)
    assert "fingerprint " in str(error.value)
    assert path.read_bytes() == before
    expected = sklearn.cluster.KMeans(3, n_init=2, random_state=0).fit(X)
    assert_same_attributes(ours.KMeans(**usual).fit(X), expected)


def test_another_estimator_is_refused(tmp_path: Path) -> None:
    ours.KMeans(3, n_init=1, shelf=tmp_path / "fit").fit(X)
    with pytest.raises(everystep.StateMismatch, match="estimator is KMeans there and MiniBatchKMeans here"):
        ours.MiniBatchKMeans(3, n_init=1, shelf=tmp_path / "fit").fit(X)


def test_parameters_are_scikit_learns_and_shelf() -> None:
    for kind in KINDS:
        theirs = kind.__mro__[2]
        parameters = kind().get_params()
        assert parameters.pop("shelf") is None
        assert parameters == theirs().get_params()
        assert kind(shelf="a").set_params(shelf="b").shelf == "b"
        with pytest.raises(ValueError, match="shelf"):
            kind(shelf=3).fit(X)


@pytest.mark.parametrize("kind", KINDS)
def test_clones_and_pickles_of_estimators_with_a_path(kind: Any, tmp_path: Path) -> None:
    model = kind(3, random_state=0, shelf=tmp_path / "fit").fit(X)
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    assert set(vars(twin)) == set(model.get_params())
    loaded = pickle.loads(pickle.dumps(model))
    assert_same_attributes(loaded, model)
    assert np.array_equal(loaded.predict(X), model.predict(X))


def test_an_open_shelf_keeps_other_names_is_shared_by_clones_and_leaves_a_pickle_as_its_path(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.shelf"
    expected = sklearn.cluster.KMeans(3, n_init=1, random_state=0).fit(X)
    with everystep.Shelf(path, size="16MiB") as shelf:
        shelf["note"] = "mine"
        model = ours.KMeans(3, n_init=1, random_state=0, shelf=shelf)
        with pytest.raises(Interruption), ends_at(3, before=False):
            model.fit(X)
        twin = clone(model)
        assert twin.shelf is shelf
        assert_same_attributes(twin.fit(X), expected)
        assert shelf["note"] == "mine"
        loaded = pickle.loads(pickle.dumps(twin))
        assert loaded.shelf == str(path)
    assert_same_attributes(loaded.fit(X), expected)


def test_a_pipeline_resumes(tmp_path: Path) -> None:
    def pipeline(kind: Any, **shelf: Any) -> Any:
        return make_pipeline(StandardScaler(), kind(3, n_init=1, random_state=0, **shelf)).fit(X)

    found, interruptions = finish_interrupted(lambda: pipeline(ours.KMeans, shelf=tmp_path / "fit"))
    assert interruptions > 2
    assert_same_attributes(found[-1], pipeline(sklearn.cluster.KMeans)[-1])
    assert np.array_equal(found.predict(X), found[-1].labels_)


def search(model: Any) -> Any:
    return GridSearchCV(model, {"n_clusters": [2, 3]}, cv=2).fit(X)


def test_a_grid_search_keeps_each_fit_in_a_directory_and_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "fits"
    folder.mkdir()
    model = {"n_init": 1, "random_state": 0}
    found, interruptions = finish_interrupted(lambda: search(ours.KMeans(**model, shelf=folder)), every=4)
    assert interruptions > 2
    assert len(list(folder.glob("*.shelf"))) == 5  # two folds of two candidates, and the best with all data
    expected = search(sklearn.cluster.KMeans(**model))
    assert np.array_equal(found.cv_results_["mean_test_score"], expected.cv_results_["mean_test_score"])
    assert_same_attributes(found.best_estimator_, expected.best_estimator_)


def test_a_grid_search_with_one_file_fails_and_the_error_suggests_a_directory(tmp_path: Path) -> None:
    with pytest.raises(everystep.StateMismatch, match="directory"):
        GridSearchCV(
            ours.KMeans(n_init=1, shelf=tmp_path / "one"), {"n_clusters": [2, 3]}, cv=2, error_score="raise"
        ).fit(X)


def test_partial_fit_with_a_shelf_is_refused(tmp_path: Path) -> None:
    model = ours.MiniBatchKMeans(3, n_init=1, random_state=0, shelf=tmp_path / "fit")
    with pytest.raises(ValueError, match=r"everystep\.integrations\.sklearn\.stream"):
        model.partial_fit(X)
    found = model.set_params(shelf=None).partial_fit(X)
    assert_same_attributes(found, sklearn.cluster.MiniBatchKMeans(3, n_init=1, random_state=0).partial_fit(X))


def test_scikit_learns_errors_about_data_and_parameters_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_clusters"):
        ours.KMeans(0, shelf=tmp_path / "fit").fit(X)
    with pytest.raises(ValueError, match="n_samples=2 should be >= n_clusters=3"):
        ours.KMeans(3, shelf=tmp_path / "fit").fit(X[:2])
    assert list(tmp_path.iterdir()) == []


def test_other_threads_fits_do_not_notice(tmp_path: Path) -> None:
    kernel = sklearn.cluster._kmeans.lloyd_iter_chunked_dense
    ours.KMeans(3, n_init=1, shelf=tmp_path / "fit").fit(X)
    assert sklearn.cluster._kmeans.lloyd_iter_chunked_dense is kernel
    assert "range" not in vars(sklearn.cluster._kmeans)


@pytest.mark.parametrize("version", ["1.2.2", "1.10.0", "2.0", "unknown"])
def test_an_unsupported_version_is_an_error_that_names_both(version: str) -> None:
    with pytest.raises(
        everystep.errors.UnsupportedVersion, match=f"scikit-learn {version} .* supports 1.3 to 1.9"
    ):
        versions.check(version)
    versions.check(sklearn.__version__)


def test_estimators_that_replace_scikit_learns_names_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As who tests ours in place of scikit-learn's does, or who patches scikit-learn."""
    names = {"KMeans": {"n_init": 2}, "MiniBatchKMeans": {"n_init": 2}, "GaussianMixture": {}}
    theirs = [
        getattr(sklearn.mixture if name == "GaussianMixture" else sklearn.cluster, name)(
            3, random_state=0, **more
        ).fit(X)
        for name, more in names.items()
    ]
    for kind in KINDS:
        monkeypatch.setattr(
            sklearn.mixture if kind is ours.GaussianMixture else sklearn.cluster, kind.__name__, kind
        )
    for kind, more, their in zip(KINDS, names.values(), theirs, strict=True):
        fitted = kind(3, random_state=0, shelf=tmp_path / kind.__name__, **more).fit(X)
        assert np.array_equal(fitted.predict(X), their.predict(X))


def test_code_that_is_not_scikit_learns_is_named() -> None:
    def fit(self: Any) -> None:
        """Of another library."""

    with pytest.raises(
        everystep.errors.UnsupportedVersion, match=r"fit of .*test_estimators has taken the place"
    ):
        loops.with_names(fit, {"lloyd": None})


def test_a_function_without_the_expected_names_is_an_unsupported_version() -> None:
    with pytest.raises(everystep.errors.UnsupportedVersion, match="does not use lloyd"):
        loops.with_names(sklearn.cluster.KMeans.fit, {"lloyd": None})
