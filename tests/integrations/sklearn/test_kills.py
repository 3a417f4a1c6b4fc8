"""Real processes, killed by SIGKILL in the middle of a fit, again and again: the last one finds the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from support.shelves import killed_fits

TESTS = Path(__file__).parents[2]


def check_killed(kind: str, tmp_path: Path, seed: int, kills: int) -> int:
    result = tmp_path / "result.npz"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "support.shelves.killed_fits",
            kind,
            tmp_path / "f.shelf",
            result,
            str(seed),
            str(kills),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, done.stderr
    expected = killed_fits.public_attributes(killed_fits.fit(kind, None))
    with np.load(result, allow_pickle=False) as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, name
            assert found[name].tobytes() == value.tobytes(), name
    return int(done.stdout)


def test_a_fit_killed_again_and_again_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    assert check_killed("kmeans", tmp_path, seed=1, kills=12) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", killed_fits.KINDS)
def test_storms_of_kills(kind: str, seed: int, tmp_path: Path) -> None:
    assert check_killed(kind, tmp_path, seed, kills=1000) >= 5
