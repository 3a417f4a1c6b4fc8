from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.shelves.shelf_schemes import scratch


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: for thousands of files that nothing has to keep."""
    directory = scratch(tmp_path)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
