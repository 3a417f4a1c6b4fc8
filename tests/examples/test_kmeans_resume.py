"""The example of a killed KMeans runs, and really kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
EXAMPLE = Path(__file__).parents[2] / "examples" / "kmeans_resume.py"


def test_a_killed_fit_ends_as_an_uninterrupted_one() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "killed in run 0 at iteration" in done.stdout
    assert "killed in run 1 at iteration" in done.stdout
    assert "bit for bit" in done.stdout
    assert len(EXAMPLE.read_text().splitlines()) < 60
