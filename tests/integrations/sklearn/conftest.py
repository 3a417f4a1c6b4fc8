"""One thread: with more than two, scikit-learn itself adds in an order that changes from run to run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    pytest.importorskip("sklearn")
    with threadpoolctl.threadpool_limits(limits=1):
        yield


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory, where there is such a place: thousands of commits are not to wait for a disk."""
    made = Path(tempfile.mkdtemp(prefix="everystep-test-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        yield made
    finally:
        shutil.rmtree(made)
