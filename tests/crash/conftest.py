"""Where crash tests put their files, and in which ways a checkpoint can be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import everystep
from everystep.engine import BACKENDS, Backend, capabilities, faults
from support.crashes.crash_tracing import Tally


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where syncs cost nothing; an ordinary one on machines that have none."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(prefix="everystep-test-", dir=shm))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def fast(ram: Path, tmp_path: Path) -> Path:
    """`ram`, if every usable backend works there: before Linux 6.6 memory has no direct I/O."""
    return ram if set(USABLE) <= set(_usable(str(ram))) else tmp_path


def _usable(directory: str) -> list[Backend]:
    able = capabilities(directory)
    return [b for b in BACKENDS if b == "buffered" or (able.direct and (b == "threads" or able.uring))]


USABLE = _usable(tempfile.gettempdir())

WAYS: dict[str, everystep.Options] = {
    # Without a small limit even a tiny state goes the way of large ones: preallocated, in windows, direct.
    **{backend: everystep.Options(backend=backend, small_nbytes=0) for backend in USABLE},
    "small": everystep.Options(),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> everystep.Options:
    """Each way to write: every backend that this machine has, and the short cut for small states."""
    return WAYS[request.param]


@pytest.fixture
def spare_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny checkpoints, too, become spares with a sync of their own, as large ones do."""
    monkeypatch.setattr("everystep.store.run.SPARE_NOW_NBYTES", 1)


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[[Tally], None]:
    """Takes the tally of an enumeration; the sum of all is printed when the tests are done."""

    def report(tally: Tally) -> None:
        print(tally)
        for field in ("states", "views", "recoveries"):
            record_property(f"crash-{field}", getattr(tally, field))

    return report


@pytest.fixture(autouse=True)
def _no_fault_left_behind() -> Iterator[None]:
    yield
    faults.install()
