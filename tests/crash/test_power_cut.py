"""A power cut at any moment: what was reported durable comes back, and never wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast

from . import sequences
from .power import Budget
from .recovery import PathRecovery, RunRecovery
from .tracing import Recording, Survey, Tally

Sequence = Callable[[Path, holdfast.Options], Recording]

@pytest.fixture(params=["spare-later", "spare-now"])
def _spares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to recycle: a retired checkpoint waits for the next save's sync, or gets one of its own."""
    if request.param == "spare-now":
        monkeypatch.setattr("holdfast.store.run.SPARE_NOW_NBYTES", 1)


@pytest.mark.usefixtures("_spares")
@pytest.mark.parametrize(
    "sequence", [sequences.steady, sequences.same_steps_again, sequences.after_damage], ids=lambda f: f.__name__
)
def test_power_cut_in_a_run(tmp_path: Path, ram: Path, way: holdfast.Options, sequence: Sequence) -> None:
    recording = sequence(tmp_path, way)
    tally = Survey(ram, RunRecovery())(recording)
    print(tally)
