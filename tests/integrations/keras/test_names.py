"""Names of Keras variables do not depend on what else a process has built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from everystep.integrations.keras import names as keras_names
from everystep.integrations.keras.names import named, named_slots


class Variable(NamedTuple):
    path: str


def variables(*paths: str) -> list[Variable]:
    return [Variable(path) for path in paths]


@pytest.fixture(autouse=True)
def without_keras(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(keras_names, "_automatic_names", lambda: {"sequential", "dense", "variable"})
    yield
    keras_names._names.cache_clear()
    keras_names._slot_names.cache_clear()


def test_numbers_are_those_of_the_model() -> None:
    first = variables("sequential/dense/kernel", "sequential/dense/bias", "sequential/dense_1/kernel")
    later = variables(
        "sequential_4/dense_9/kernel", "sequential_4/dense_9/bias", "sequential_4/dense_12/kernel"
    )
    assert list(named(first)) == list(named(later))
    assert list(named(first)) == [
        "sequential.dense.kernel",
        "sequential.dense.bias",
        "sequential.dense_1.kernel",
    ]


def test_names_that_a_user_gave_stay() -> None:
    found = named(variables("gpt/block_7/dense_3/kernel", "gpt/block_8/dense_4/kernel"))
    assert list(found) == ["gpt.block_7.dense.kernel", "gpt.block_8.dense.kernel"]


def test_equal_paths_are_distinguished() -> None:
    same = variables("a/kernel", "a/kernel")
    assert list(named(same)) == ["a.kernel", "a.kernel~1"]


def test_variables_of_an_optimizer_are_named_after_those_it_trains() -> None:
    trained = variables("sequential_1/dense_2/kernel", "sequential_1/dense_2/kernel_more")
    slots = variables(
        "adam_1/iteration",
        "adam_1/sequential_1_dense_2_kernel_momentum",
        "adam_1/sequential_1_dense_2_kernel_more_momentum",
    )
    assert list(named_slots(slots, trained)) == [
        "iteration",
        "sequential.dense.kernel.momentum",
        "sequential.dense.kernel_more.momentum",
    ]


def test_variables_without_given_names_are_counted_in_their_optimizer() -> None:
    trained = variables("dense_2/variable_7", "dense_2/variable_8")
    slots = variables("sgd/iteration", "sgd/variable_9", "sgd/dense_2_variable_8_momentum", "sgd/variable_10")
    assert list(named_slots(slots, trained)) == [
        "iteration",
        "variable",
        "dense.variable_1.momentum",
        "variable_1",
    ]
