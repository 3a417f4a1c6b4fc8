"""Runs the tests in two stages, for `make test`; arguments are handed on to pytest.

First all that can share the machine, in several processes. Then the tests marked `race`, one at a time: they
race processes against each other, and what competes with them changes how that ends. Only those that fail
there run a second time. They are named even if they pass then: each is a defect whose cause is to be found.

With ``-m`` among the arguments the choice is the caller's, and there is one stage.

Each run keeps what it prints in ``build/test-runs/TIME/``, and for each test that failed a file with its
output. The names of those are printed last. This file is also the plugin of pytest that writes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKERS = 3
"""For two processors: a part of the tests waits for devices, time-outs and other processes."""
OPT_IN = "not slow and not crash_large and not native and not peers and not browser and not dist"
CACHE = Path(".pytest_cache/race")
RUNS = Path("build/test-runs")
KEPT_RUNS = 20
PASSED, FAILED, NOTHING_SELECTED = 0, 1, 5
_DIRECTORY = "TESTS_FAILURES"
"""Where the plugin writes, told to pytest's processes by the environment."""
_NAMES = "failed.txt"


# --- the plugin, in the process of pytest that hears of all tests ------------------------------------------


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        # "???": a worker that died with it
        note_failure(f"{report.nodeid} ({report.when.replace('???', 'its process died')})", report)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        note_failure(f"{report.nodeid} (collection)", report)


def note_failure(name: str, report: Any) -> None:
    """Written at once: it stays if the run itself is ended."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # its controller hears of it, too, and also of workers that die
    directory = Path(os.environ[_DIRECTORY])
    text = [name, "", report.longreprtext]
    text += [f"--- {title} ---\n{content}" for title, content in report.sections]
    with open(directory / _NAMES, "a") as names:
        names.write(f"{name}\n")
    with open(directory / f"{re.sub('[^A-Za-z0-9_.-]+', '-', name)[:150]}.txt", "a") as file:
        file.write("\n".join(text) + "\n")


# --- the two stages -----------------------------------------------------------------------------------------


def pytest(directory: Path, *arguments: str) -> int:
    """Runs pytest. What it prints also goes to a file in the directory."""
    command = [sys.executable, "-m", "pytest", "-q", "--durations=25", "-p", Path(__file__).stem, *arguments]
    if sys.stdout.isatty():
        command.append("--color=yes")
    paths = [str(Path(__file__).parent.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), _DIRECTORY: str(directory.resolve())}
    with open(directory / "output.txt", "ab") as output:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, bufsize=0
        )
        assert process.stdout is not None
        while data := process.stdout.read(1 << 16):
            output.write(data)
            output.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        code = process.wait()
    return PASSED if code == NOTHING_SELECTED else code


def failures() -> set[str]:
    """The tests that failed when they last ran, as pytest notes them down."""
    noted = CACHE / "v/cache/lastfailed"
    return set(json.loads(noted.read_text())) if noted.exists() else set()


def race(directory: Path, arguments: list[str]) -> tuple[int, list[str]]:
    """The exit code, and a line for each that failed."""
    mine = ["-n", "0", "-m", f"{OPT_IN} and race", "-o", f"cache_dir={CACHE}", *arguments]
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        # To look at all others would take longer than some of the tests.
        mine += [
            str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.race" in path.read_text()
        ]
    code = pytest(directory, "--cache-clear", *mine)
    if code != FAILED:
        return code, []
    first = failures()
    code = pytest(directory, "--last-failed", "--last-failed-no-failures", "none", *mine)
    again = failures()
    said = {True: "failed twice:", False: "passed the second time, find the cause:"}
    return code, [f"{said[name in again]} {name}" for name in sorted(first)]


def main(arguments: list[str]) -> int:
    directory = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    directory.mkdir(parents=True)
    for old in sorted(RUNS.iterdir())[:-KEPT_RUNS]:
        shutil.rmtree(old)
    races: list[str] = []
    if any(argument.startswith("-m") for argument in arguments):
        code = pytest(directory, "-n", str(WORKERS), *arguments)
    else:
        code = pytest(directory, "-n", str(WORKERS), "-m", f"{OPT_IN} and not race", *arguments)
        if code in (PASSED, FAILED):
            second, races = race(directory, arguments)
            code = second or code
    noted = directory / _NAMES
    failed = sorted(set(noted.read_text().splitlines())) if noted.exists() else []
    if failed:
        print(f"\nfailed, with their output in {directory}:", flush=True)
        print("\n".join([*failed, *races]), flush=True)
    elif code != PASSED:
        print(f"\npytest ended with exit code {code}; what it printed is in {directory}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
