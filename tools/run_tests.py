"""Runs the tests in two stages, for `make test`; arguments are handed on to pytest.

First all that can share the machine, in several processes. Then the tests marked `race`, one at a time: they
race processes against each other, and what competes with them changes how that ends. Only those that fail
there run a second time. They are named even if they pass then: each is a defect whose cause is to be found.

With ``-m`` among the arguments the choice is the caller's, and there is one stage.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

WORKERS = 3
"""For two processors: a part of the tests waits for devices, time-outs and other processes."""
OPT_IN = "not slow and not crash_large and not native and not peers and not browser and not dist"
CACHE = Path(".pytest_cache/race")
PASSED, FAILED, NOTHING_SELECTED = 0, 1, 5


def pytest(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "--durations=25", *arguments]
    code = subprocess.run(command).returncode
    return PASSED if code == NOTHING_SELECTED else code


def failures() -> set[str]:
    """The tests that failed when they last ran, as pytest notes them down."""
    noted = CACHE / "v/cache/lastfailed"
    return set(json.loads(noted.read_text())) if noted.exists() else set()


def race(arguments: list[str]) -> int:
    mine = ["-n", "0", "-m", f"{OPT_IN} and race", "-o", f"cache_dir={CACHE}", *arguments]
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        # To look at all others would take longer than some of the tests.
        mine += [
            str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.race" in path.read_text()
        ]
    code = pytest("--cache-clear", *mine)
    if code != FAILED:
        return code
    first = failures()
    code = pytest("--last-failed", "--last-failed-no-failures", "none", *mine)
    again = failures()
    for name in sorted(first):
        print(
            "failed twice:" if name in again else "passed the second time, find the cause:", name, flush=True
        )
    return code


def main(arguments: list[str]) -> int:
    if any(argument.startswith("-m") for argument in arguments):
        return pytest("-n", str(WORKERS), *arguments)
    first = pytest("-n", str(WORKERS), "-m", f"{OPT_IN} and not race", *arguments)
    if first not in (PASSED, FAILED):
        return first
    return race(arguments) or first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
