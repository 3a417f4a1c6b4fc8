"""Where crash tests put their files, and in which ways a checkpoint can be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.engine import BACKENDS, Backend, capabilities, faults


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where syncs cost nothing; an ordinary one on machines that have none."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir=shm))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def _usable() -> list[Backend]:
    able = capabilities(tempfile.gettempdir())
    return [b for b in BACKENDS if b == "buffered" or (able.direct and (b == "threads" or able.uring))]


USABLE = _usable()

WAYS: dict[str, holdfast.Options] = {
    # Without a small limit even a tiny state takes the way of the large ones: preallocated, in windows, direct.
    **{backend: holdfast.Options(backend=backend, small_nbytes=0) for backend in USABLE},
    "small": holdfast.Options(),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> holdfast.Options:
    """Each way to write: every backend that this machine has, and the short cut for small states."""
    return WAYS[request.param]


@pytest.fixture(autouse=True)
def _no_fault_left_behind() -> Iterator[None]:
    yield
    faults.install()
