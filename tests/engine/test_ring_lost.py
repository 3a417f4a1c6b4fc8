"""io_uring that stops working while jobs are under way: no byte is lost, and the process lives.

A seccomp filter that is installed while the program runs makes `io_uring_enter` fail from then on.
The kernel still moves what it was given before. The engine finds out when that is done, and does the rest
with threads.
"""

from __future__ import annotations

import platform
import textwrap
from pathlib import Path

import pytest

from everystep.engine import choose_backend
from support.crashes.forbidden_calls import run

PRELUDE = """
import threading
import numpy as np
import everystep
from everystep import engine
from everystep.engine import Consumed, Memory, Produced, ReadPiece, Tuning, WritePiece, capabilities, fs

path, code = sys.argv[1] + "/f", getattr(errno, sys.argv[2])
WINDOW, COUNT, LOST_AT = 64 << 10, 64, 20
tuning = Tuning("uring", WINDOW, 8, 0)
data = np.random.default_rng(1).integers(0, 256, COUNT * WINDOW, np.uint8)
out = np.zeros_like(data)
lost = False

def lose(offset):
    global lost
    if offset >= LOST_AT * WINDOW and not lost:
        lost = True
        forbid(IO_URING_ENTER, code)

def fill(window, offset):
    lose(offset)
    window[:] = data[offset : offset + len(window)].data

def drain(window, offset):
    lose(offset)
    out[offset : offset + len(window)] = np.frombuffer(window, np.uint8)

def the_next_save_works():
    assert lost
    state = {"w": np.arange(1 << 20)}
    for name in ("next", "after"):
        everystep.save(sys.argv[1] + "/" + name, state)
        assert (everystep.load(sys.argv[1] + "/" + name)["w"] == state["w"]).all()
"""

SCRIPTS = {
    "a write goes on with threads": """
        job = engine.write(path, data.nbytes, [WritePiece(0, Produced(data.nbytes, fill))], tuning=tuning)
        job.wait(100)
        fs.sync([job])
        assert open(path, "rb").read() == data.tobytes()
    """,
    "a read goes on with threads": """
        data.tofile(path)
        engine.read(path, [ReadPiece(0, Consumed(data.nbytes, drain))], tuning=tuning, verify=False)
        assert (out == data).all()
    """,
    "a write that fails just then fails with its own error": """
        def fails(window, offset):
            fill(window, offset)
            if lost:
                raise KeyError("this one")
        job = engine.write(path, data.nbytes, [WritePiece(0, Produced(data.nbytes, fails))], tuning=tuning)
        try:
            job.wait(100)
        except KeyError as error:
            assert error.args == ("this one",)
        else:
            raise AssertionError("it did not fail")
    """,
}


@pytest.fixture
def with_rings(tmp_path: Path) -> Path:
    if choose_backend(tmp_path) != "uring":
        pytest.skip("there are no rings here")
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("the number of a system call is needed")
    return tmp_path


@pytest.mark.parametrize("code", ["EPERM", "ENOSYS"])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_ring_is_lost_while(script: str, code: str, with_rings: Path) -> None:
    run(PRELUDE + textwrap.dedent(script) + "\nthe_next_save_works()", with_rings, code)


def test_a_system_that_gives_rings_and_forbids_their_use_has_none(with_rings: Path) -> None:
    script = """
        forbid(IO_URING_ENTER, errno.EPERM)
        from everystep.engine import capabilities, choose_backend
        able = capabilities(sys.argv[1])
        assert "io_uring_enter" in able.uring_reason and "not permitted" in able.uring_reason, able
        print(choose_backend(sys.argv[1]))
    """
    assert run(script, with_rings) == "threads"
