"""`stream`: every estimator with `partial_fit` goes on at the right batch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.cluster import Birch, MiniBatchKMeans
from sklearn.decomposition import IncrementalPCA, LatentDirichletAllocation, MiniBatchDictionaryLearning
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.naive_bayes import BernoulliNB, GaussianNB, MultinomialNB
from sklearn.neural_network import BernoulliRBM, MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

import everystep
import everystep.integrations.sklearn as ours
from everystep.integrations.sklearn.estimator_state import put_together
from support.shelves.interrupted_fits import assert_same_attributes, finish_interrupted, quietly

GENERATOR = np.random.default_rng(2)
PLAIN = [GENERATOR.random((20, 6)) for _ in range(6)]
WITH_CLASSES = [(X, np.array(["no", "yes"])[(X[:, 0] > 0.5).astype(int)]) for X in PLAIN]
WITH_VALUES = [(X, X.sum(axis=1)) for X in PLAIN]
CLASSES = {"classes": np.array(["no", "yes"])}

ESTIMATORS: dict[str, tuple[Any, Iterable[Any], dict[str, Any]]] = {
    "MiniBatchKMeans": (lambda: MiniBatchKMeans(3, n_init=1, random_state=0), PLAIN, {}),
    "our MiniBatchKMeans": (lambda: ours.MiniBatchKMeans(3, n_init=1, random_state=0), PLAIN, {}),
    "SGDClassifier": (lambda: SGDClassifier(random_state=0), WITH_CLASSES, CLASSES),
    "averaged SGD": (
        lambda: SGDClassifier(average=True, loss="log_loss", random_state=0),
        WITH_CLASSES,
        CLASSES,
    ),
    "SGDRegressor": (lambda: SGDRegressor(loss="huber", random_state=0), WITH_VALUES, {}),
    "MLPClassifier": (lambda: MLPClassifier(hidden_layer_sizes=(4,), random_state=0), WITH_CLASSES, CLASSES),
    "MLPRegressor": (
        lambda: MLPRegressor(hidden_layer_sizes=(4,), solver="sgd", random_state=0),
        WITH_VALUES,
        {},
    ),
    "GaussianNB": (GaussianNB, WITH_CLASSES, CLASSES),
    "MultinomialNB": (MultinomialNB, WITH_CLASSES, CLASSES),
    "BernoulliNB": (lambda: BernoulliNB(binarize=0.5), WITH_CLASSES, CLASSES),
    "IncrementalPCA": (lambda: IncrementalPCA(2), PLAIN, {}),
    "StandardScaler": (StandardScaler, PLAIN, {}),
    "dictionary": (lambda: MiniBatchDictionaryLearning(3, random_state=0, max_iter=5), PLAIN, {}),
    "topics": (lambda: LatentDirichletAllocation(2, random_state=0), PLAIN, {}),
    "RBM": (lambda: BernoulliRBM(3, random_state=0), PLAIN, {}),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_stream_interrupted_after_every_batch_equals_an_uninterrupted_one(
    name: str, tmp_path: Path
) -> None:
    make, batches, options = ESTIMATORS[name]
    expected = make()
    for batch in batches:
        arguments = batch if isinstance(batch, tuple) else (batch,)
        quietly(lambda a=arguments: expected.partial_fit(*a, **options))
    found, interruptions = finish_interrupted(
        lambda: ours.stream(make(), iter(list(batches)), shelf=tmp_path / "s.shelf", **options)
    )
    assert interruptions >= 5
    assert_same_attributes(found, expected)


def test_a_generator_shared_with_a_parameter_stays_shared(tmp_path: Path) -> None:
    expected = MiniBatchKMeans(3, n_init=1, random_state=np.random.RandomState(3))
    for batch in PLAIN:
        expected.partial_fit(batch)
    found, _ = finish_interrupted(
        lambda: ours.stream(
            MiniBatchKMeans(3, n_init=1, random_state=np.random.RandomState(3)), PLAIN, shelf=tmp_path / "s"
        )
    )
    assert_same_attributes(found, expected)
    assert found._random_state is found.random_state


def test_batches_can_be_a_function_of_the_first_number(tmp_path: Path) -> None:
    asked: list[int] = []

    def batches(first: int) -> Iterable[Any]:
        asked.append(first)
        return iter(PLAIN[first:])

    found, _ = finish_interrupted(
        lambda: ours.stream(StandardScaler(), batches, shelf=tmp_path / "s.shelf"), every=2
    )
    assert asked[0] == 0
    assert asked[-1] > 2
    assert found.n_samples_seen_ == 120


def test_dicts_and_weights_are_arguments(tmp_path: Path) -> None:
    batches = [{"X": X, "sample_weight": np.arange(20.0)} for X in PLAIN]
    found = ours.stream(StandardScaler(), batches, shelf=tmp_path / "s.shelf")
    assert found.n_samples_seen_ == 6 * 190


def test_other_batches_are_refused_with_both_fingerprints(tmp_path: Path) -> None:
    ours.stream(StandardScaler(), PLAIN[:3], shelf=tmp_path / "s")
    with pytest.raises(
        everystep.StateMismatch, match=r"the first 3 have the fingerprint \w{16} there and \w{16}"
    ):
        ours.stream(StandardScaler(), PLAIN[1:], shelf=tmp_path / "s")


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    ours.stream(StandardScaler(), PLAIN[:3], shelf=tmp_path / "s")
    with pytest.raises(everystep.StateMismatch, match="with_mean is True there and False here"):
        ours.stream(StandardScaler(with_mean=False), PLAIN, shelf=tmp_path / "s")


def test_a_state_that_cannot_be_stored_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(everystep.UnsupportedState, match=r"attribute \S*root_ .*nothing was written"):
        ours.stream(Birch(), PLAIN, shelf=tmp_path / "s.shelf")


def test_an_estimator_without_partial_fit_or_a_missing_shelf_is_an_error() -> None:
    with pytest.raises(TypeError, match="KMeans has no partial_fit"):
        ours.stream(ours.KMeans(), PLAIN, shelf="s")
    with pytest.raises(ValueError, match="needs a shelf"):
        ours.stream(StandardScaler(), PLAIN, shelf=None)


@pytest.mark.parametrize(
    "node",
    [
        ["object", "subprocess.Popen", []],
        ["object", "sklearn.utils.os.system", []],
        ["rebuilt", "sklearn.linear_model._sgd_fast.np.zeros", [3]],
        ["rebuilt", "sklearn.cluster.KMeans", [3]],
        ["object", "sklearn.os.PathLike", []],
        ["other", 1],
    ],
)
def test_a_hostile_tree_makes_no_objects_of_other_types(node: Any) -> None:
    with pytest.raises((everystep.CorruptCheckpoint, ImportError)):
        put_together([["x", node]], {}, {})
