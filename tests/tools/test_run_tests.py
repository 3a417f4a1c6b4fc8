"""`make test` says at the very end what failed, and keeps the output of it (`tools/run_tests.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "run_tests.py"

TESTS = """
import os
import pytest

def test_passes():
    print("nothing to see")

def test_fails():
    print("seen before it failed")
    assert 1 == 2, "one is not two"

@pytest.fixture
def broken():
    raise RuntimeError("cannot be set up")

def test_errs(broken):
    pass

def test_dies():
    os._exit(7)

@pytest.mark.race
def test_loses_a_race():
    first = not os.path.exists("raced")
    open("raced", "w").close()
    assert not first, "lost the first time"
"""


FEW = ("-p", "xdist.plugin", "-n", "1")
"""To start several processes of pytest with all plugins takes long."""


def run(place: Path, text: str, *arguments: str) -> tuple[int, list[str]]:
    (place / "tests").mkdir()
    (place / "tests" / "test_it.py").write_text(textwrap.dedent(text))
    (place / "pytest.ini").write_text("[pytest]\nmarkers =\n    race: x\n    slow: x\n")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, TOOL, *FEW, *arguments],
        cwd=place,
        env=inherited | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.rstrip().splitlines()


def test_failures_of_both_stages_are_named_last_and_their_output_is_kept(tmp_path: Path) -> None:
    code, said = run(tmp_path, TESTS)
    assert code == 1
    (directory,) = (tmp_path / "build" / "test-runs").iterdir()
    begin = said.index(f"failed, with their output in build/test-runs/{directory.name}:")
    assert said[begin + 1 :] == [
        "tests/test_it.py::test_dies (its process died)",
        "tests/test_it.py::test_errs (setup)",
        "tests/test_it.py::test_fails (call)",
        "tests/test_it.py::test_loses_a_race (call)",
        "passed the second time, find the cause: tests/test_it.py::test_loses_a_race",
    ]
    kept = (directory / "tests-test_it.py-test_fails-call-.txt").read_text()
    assert "one is not two" in kept
    assert "seen before it failed" in kept
    assert "cannot be set up" in (directory / "tests-test_it.py-test_errs-setup-.txt").read_text()
    assert "lost the first time" in (directory / "tests-test_it.py-test_loses_a_race-call-.txt").read_text()
    everything = (directory / "output.txt").read_text().splitlines()
    assert [line for line in said[: begin - 1] if line] == [line for line in everything if line]


def test_a_run_that_passes_names_nothing(tmp_path: Path) -> None:
    code, said = run(tmp_path, "def test_passes():\n    pass\n")
    assert code == 0
    assert not [line for line in said if "failed" in line]


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    code, said = run(tmp_path, "import no_such_module\n", "-m", "not slow")
    assert code != 0
    assert said[-1] == "tests/test_it.py (collection)"
