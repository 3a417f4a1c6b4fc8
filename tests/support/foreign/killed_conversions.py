"""A conversion that is killed at each of its calls of the file system, and runs again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import everystep
from everystep.engine import faults
from everystep.errors import CheckpointExists
from support.processes.child_processes import Pipe, forked


def assert_survives_kills(
    folder: Path, convert: Callable[[Path], object], assert_whole: Callable[[Path], None]
) -> int:
    """A kill leaves nothing or the whole result; running again leaves just that. Counts the calls."""
    out = folder / "out"

    def work(pipe: Pipe, nth: int) -> None:
        faults.install(*faults.parse(f"any:{nth}:kill"))
        convert(out)

    nth, code = 0, -signal.SIGKILL
    while code:
        assert code == -signal.SIGKILL
        nth += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with forked(work, nth) as child:
            child.pipe.drain()
            code = child.wait()
        if not out.exists():
            with pytest.raises(FileNotFoundError):
                everystep.open(out)
            convert(out)
        elif code:  # killed behind the commit: running again says so, and removes what is left
            assert_whole(out)
            with pytest.raises(CheckpointExists):
                convert(out)
        assert_whole(out)
        assert os.listdir(folder) == ["out"], nth
    return nth
