"""Memory that runs out at each allocation of a transaction in turn: the commit is whole, or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.crashes import failing_memory

pytestmark = pytest.mark.skipif(failing_memory.compiler() is None, reason="no C++ compiler is there")

CHILD = """
import os, sys
import numpy as np
import everystep
from everystep import Shelf
from support.crashes.failing_memory import FailingMemory

memory = FailingMemory()
path, medium = sys.argv[1:]


def content(shelf):
    found = {name: np.asarray(shelf[name]) for name in shelf}
    return {name: (array.shape, array.dtype, hash(array.tobytes())) for name, array in found.items()}


def change(shelf, number):
    # Replaces, adds and removes; so many that the directory gets more nodes.
    with shelf.transaction():
        shelf["a"] = np.full(30, number)
        shelf["a"] = np.full(900, number)
        shelf["large"] = np.full(200_000, number)
        shelf.writable("w")[0] = number
        for i in range(20):
            shelf[f"new {number} {i} " + "long " * 20] = i
            if f"old {i}" in shelf:
                del shelf[f"old {i}"]


def check(path, wanted):
    with Shelf(path, mode="r") as reader:
        assert content(reader) == wanted
        assert reader.verify() == []


failures = nth = 0
happened = True
while happened:
    nth += 1
    where = f"{path}.{nth}"
    shelf = Shelf(where, "64MiB", _medium=medium)
    with shelf.transaction():
        shelf["w"], shelf["a"], shelf["large"] = np.zeros(5), np.zeros(900), np.zeros(1000)
        for i in range(10):
            shelf[f"old {i}"] = np.full(3, i)
    before = content(shelf)
    try:
        with memory.at(nth):
            change(shelf, 1)
    except (MemoryError, everystep.SaveFailed):
        assert memory.happened
        failures += 1
        assert content(shelf) == before, nth
        if shelf._opened().failure:
            shelf.close()
            shelf = Shelf(where, _medium=medium)
            assert content(shelf) == before or "new 1 0 " + "long " * 20 in shelf
    happened = memory.happened
    check(where, content(shelf))
    change(shelf, 2)
    after = content(shelf)
    assert shelf["a"].tolist() == [2] * 900 and shelf["w"].tolist() == [2, 0, 0, 0, 0]
    assert len(after) == 23 + ("new 1 0 " + "long " * 20 in after) * 20
    check(where, after)
    assert shelf.usage.file < 8 << 20
    shelf.close()
    with Shelf(where, _medium=medium) as shelf:
        assert content(shelf) == after
        shelf["a"] = 3
        check(where, content(shelf))
        assert {**content(shelf), "a": 0} == {**after, "a": 0}
    os.unlink(where)
print(failures)
"""


@pytest.mark.parametrize("medium", ["page cache", "memory"])
def test_a_transaction_for_which_memory_runs_out_loses_nothing(memory: Path, medium: str) -> None:
    library = failing_memory.built(memory)
    environment = {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(memory / "a.shelf"), medium]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 50
