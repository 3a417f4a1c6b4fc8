"""What every test gets: a clean engine environment, places, and hypothesis settings that fit slow disks."""

from __future__ import annotations

import gc
import importlib.abc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Many properties write real files; a deadline per example would measure the disk, not the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell starts what it puts into the background deaf to Ctrl-C, and children inherit that; some tests send
# it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _SkipsWithout(importlib.abc.MetaPathFinder):
    """Skips what imports a library that is not there, in `make compat`; elsewhere that is a failure."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] == self._name:
            pytest.skip(f"{self._name} is not installed", allow_module_level=True)


for _library in os.environ.get("TESTS_WITHOUT", "").split():
    sys.meta_path.append(_SkipsWithout(_library))  # asked last: when no other has found it


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shell sets (a backend, a fault, the width of its window) must not decide what a test sees."""
    terminal = ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TERMINAL_WIDTH")
    for name in [name for name in os.environ if name.startswith("EVERYSTEP_") or name in terminal]:
        monkeypatch.delenv(name)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can reach, unlike pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="everystep-test-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def pytest_collection_finish() -> None:
    """By now all is imported, torch too. Collections, of which some tests make hundreds, leave it alone."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The sums of `crash`, which are recorded in reports so that tests can run in several processes.

    Here and not in `crash`: the process that prints loads no other conftest then.
    """
    sums: dict[str, int] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if report.when == "call" and name.startswith("crash-"):
                sums[name.removeprefix("crash-")] = sums.get(name.removeprefix("crash-"), 0) + value
    if "states" in sums:
        terminalreporter.write_line(
            f"power cuts: {sums['states']} states of the disk tried ({sums['views']} as readers see them), "
            f"{sums['recoveries']} recoveries"
        )
    if "faults" in sums:
        terminalreporter.write_line(f"failing calls: {sums['faults']}; kills: {sums.get('kills', 0)}")
    if "images" in sums:
        terminalreporter.write_line(
            f"images of ext4: {sums['images']}, {sums['image-checkpoints']} checkpoints read from them"
        )
    _write_layouts(terminalreporter)


def _write_layouts(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables of layouts x layouts, as `distributed/test_layouts.py` recorded them, also when it failed."""
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, table in report.user_properties:
            if report.when == "call" and name == "layouts":
                for line in table:
                    terminalreporter.write_line(line)
