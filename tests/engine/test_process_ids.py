"""A process that gets the id of its dead ancestor is not taken for it.

Ids of processes are given out again. In a namespace of its own root may say which comes next.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from support.crashes.forbidden_calls import run

SCRIPT = """
import select, threading, time
import numpy as np
from everystep import engine
from everystep.engine import Memory, Produced, Tuning, WritePiece, fs

folder, backend = sys.argv[1:]
tuning = Tuning(backend, 64 << 10, 4, 0)
data = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)

def write(name):
    pieces = [WritePiece(0, Memory(data.ctypes.data, data.nbytes, data))]
    job = engine.write(f"{folder}/{name}", data.nbytes, pieces, tuning=tuning)
    job.wait(60)
    fs.sync([job])
    return open(f"{folder}/{name}", "rb").read() == data.tobytes()

def in_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work() or 0
        finally:
            os._exit(code)
    return pid

def first():
    "Has a job under way and memory kept for the next one, and dies."
    reached, never = threading.Event(), threading.Event()
    def fill(window, offset):
        reached.set()
        never.wait()
    pieces = [WritePiece(0, Produced(data.nbytes, fill))]
    job = [engine.write(f"{folder}/under way", data.nbytes, pieces, tuning=tuning)]
    held = [fs.lock_directory(folder, True)]
    assert reached.wait(60)
    assert write("first")
    me = os.getpid()
    in_child(lambda: second(me, job, held))
    os._exit(0)  # without waiting for the job

def second(ancestor, job, held):
    while alive(ancestor):
        time.sleep(0.01)
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(ancestor - 1))
    pid = in_child(lambda: third(ancestor, job, held))
    assert pid == ancestor, (pid, ancestor)
    os.write(told, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())

def third(ancestor, job, held):
    assert os.getpid() == ancestor
    job.clear()  # its thread does not exist here: there is nothing to wait for
    held.clear()
    assert write("third")

def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

heard, told = os.pipe()
assert ctypes.CDLL(None, use_errno=True).unshare(0x2000_0000) == 0  # CLONE_NEWPID
def init():
    in_child(first)
    while True:  # a process that is left behind becomes its child, and is reaped here
        try:
            os.wait()
        except ChildProcessError:
            return 0
init_pid = in_child(init)
os.close(told)
ready, _, _ = select.select([heard], [], [], 60)
print(os.read(heard, 10).decode() if ready else "it hangs")
os.kill(init_pid, 9)  # and all in the namespace with it
"""


@pytest.mark.parametrize("backend", ["threads", "buffered"])
def test_a_process_with_the_id_of_its_grandparent_starts_its_own_jobs(tmp_path: Path, backend: str) -> None:
    if not os.path.exists("/proc/sys/kernel/ns_last_pid") or not _may_unshare():
        pytest.skip("only root may choose ids of processes")
    assert run(SCRIPT, tmp_path, backend) == "0"
    assert (tmp_path / "third").read_bytes() == (tmp_path / "first").read_bytes()


def _may_unshare() -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ctypes.CDLL(None).unshare(0x2000_0000) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0
