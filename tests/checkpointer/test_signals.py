"""A signal handler that raises (Ctrl-C) at any moment of a training leaves a Checkpointer that saves on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import everystep

ROOT = Path(__file__).parents[1]
SECONDS = 300


def storm(mode: str, signals: int, run: Path, seconds: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "support.crashes.signal_storm", mode, str(signals), run],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "SIGTERM received" in done.stderr
    with everystep.open(run) as last:
        assert f"step {last.step} is saved" in done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", ["sync", "snapshot", "overlap"])
def test_a_training_under_signals_saves_on_and_hears_sigterm(mode: str, tmp_path: Path) -> None:
    storm(mode, 100, tmp_path / "run", SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["sync", "snapshot", "overlap"])
def test_a_training_under_ten_thousand_signals(mode: str, tmp_path: Path) -> None:
    print(mode, storm(mode, 10_000, tmp_path / "run", 3600))
