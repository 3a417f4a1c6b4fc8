"""Promise: where nothing fits, the message shows both sides and guesses why."""

from __future__ import annotations

import pytest

from everystep.state.mismatch import Mismatch, another_prefix

NAMES = ["h.0.weight", "h.0.bias", "h.1.weight", "h.1.bias"]


def under(prefix: str) -> list[str]:
    return [prefix + name for name in NAMES]


@pytest.mark.parametrize(
    ("target", "checkpoint", "guess"),
    [
        (NAMES, under("model."), "have 'model.' before them in the checkpoint"),
        (under("module."), NAMES, "begin with 'module.'; those of the checkpoint do not"),
        (under("net."), under("model.module."), "begin with 'net.' in the target begin with 'model.module.'"),
        ([*NAMES, "new"], ["old", *under("model.")], "'model.' before them"),
        (["a", "b"], ["c", "d"], None),
        (["x.weight", "y.bias"], ["p.q.weight", "r.scale"], None),
        (["w"], [], None),
        ([], ["w"], None),
    ],
)
def test_another_beginning_is_guessed(target: list[str], checkpoint: list[str], guess: str | None) -> None:
    found = another_prefix(target, checkpoint)
    assert found == guess if guess is None else guess in str(found)


def test_a_few_names_of_both_sides_are_shown() -> None:
    many = tuple(f"layer.{number}" for number in range(1000))
    error = Mismatch(many, tuple(f"model.{name}" for name in many), ()).nothing("here")
    assert error.missing == many
    text = str(error)
    for part in (
        "here: no array",
        "layer.0",
        "model.layer.0",
        "995 more",
        "'model.'",
        "Nothing has been changed",
    ):
        assert part in text
    assert "restored." not in text
    assert len(text) < 1000
