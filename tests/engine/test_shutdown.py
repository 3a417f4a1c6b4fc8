"""An interpreter that ends while jobs are under way ends as if there were none."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from everystep.engine import Backend
from support.states.waiting_jobs import PATIENCE

# Every write takes far longer than the interpreter needs to end.
PRELUDE = """
import sys, threading
import numpy as np
from everystep import engine
from everystep.engine import Consumed, Memory, Produced, ReadPiece, Tuning, WritePiece, faults, fs

path, backend = sys.argv[1:]
tuning = Tuning(backend, 64 << 10, 3, 0)
data = np.ones(4 << 20, np.uint8)
memory = Memory(data.ctypes.data, data.nbytes, data)
reached, never = threading.Event(), threading.Event()
data.tofile(path)
faults.install(*faults.parse("write:1:slow200+,read:1:slow200+,sync:1:slow200+"))

def fill(window, offset):
    reached.set()
    never.wait()

def busy(window, offset):
    reached.set()
    for _ in range(100_000):
        pass

def write(source):
    return engine.write(path, data.nbytes, [WritePiece(0, source)], tuning=tuning, recycle=True)

def read(destination, progress=None):
    engine.read(path, [ReadPiece(0, destination)], tuning=tuning, verify=False, progress=progress)

def beside(work):
    threading.Thread(target=work, daemon=True).start()
"""

SCRIPTS = {
    "a job is waited for": "beside(lambda: write(memory).wait())",
    "a read is waited for": "beside(lambda: read(memory, lambda done: None))",
    "a read is under way": "beside(lambda: read(memory))",
    "a sync is under way": "beside(lambda: fs.sync([fs.write_file(path, b'data', recycle=True)]))",
    "a job is forgotten": "job = write(memory)",
    "a job stands in its producer": "job = write(Produced(data.nbytes, fill)); reached.wait()",
    "a job runs its producer": "job = write(Produced(data.nbytes, busy)); reached.wait()",
    "a job in its producer is waited for": "beside(write(Produced(data.nbytes, fill)).wait); reached.wait()",
    "a read stands in its consumer": "beside(lambda: read(Consumed(data.nbytes, fill))); reached.wait()",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_interpreter_ends_while(script: str, backend: Backend, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), os.fspath(tmp_path / "f"), backend],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
