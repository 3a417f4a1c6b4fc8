"""Signals whose handler raises, as Ctrl-C does, at any moment of a transaction: it is whole, or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import faulthandler, itertools, random, signal, sys
import numpy as np
from everystep import Shelf

path, wanted = sys.argv[1], int(sys.argv[2])
faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
rng = random.Random(1)
armed = False
struck = 0


class Interrupt(BaseException):
    pass


def strike(*_):
    global armed, struck
    if armed:
        armed = False
        struck += 1
        raise Interrupt


def change(shelf, number):
    with shelf.transaction():
        shelf["n"] = number
        shelf["a"] = np.full(50 + number % 3, number)
        shelf.writable("b")[:] = number
        if number % 2:
            shelf["odd"] = number
        elif "odd" in shelf:
            del shelf["odd"]
        shelf["a"] += 0


def check(shelf, allowed):
    number = shelf["n"]
    assert number in allowed, (number, allowed)
    assert shelf["a"].tolist() == [number] * (50 + number % 3)
    assert shelf["b"].tolist() == [number] * 9
    assert ("odd" in shelf) == bool(number % 2)


signal.signal(signal.SIGALRM, strike)
shelf = Shelf(path, "1MiB")
with shelf.transaction():
    shelf["n"], shelf["a"], shelf["b"] = 0, np.zeros(50), np.zeros(9)
for number in itertools.count(1):
    if struck >= wanted:
        break
    before = shelf["n"]
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 3e-4))  # strikes once, and always in the block
        while armed:
            if number % 5 == 1:
                shelf.close()
                shelf = Shelf(path, "1MiB")
            change(shelf, number)
            if number % 5 == 0:
                shelf["single"] = number
    except Interrupt:
        # The traceback keeps all frames alive, with what they were doing.
        if number % 5 == 1:
            shelf.close()
            shelf = Shelf(path)
        check(shelf, (before, number))
        with shelf.transaction():
            shelf["later"] = number
    check(shelf, (before, number))
shelf.close()
with Shelf(path) as shelf:
    check(shelf, range(number + 1))
    assert shelf.verify() == []
print(struck)
"""


def _strike(path: Path, signals: int, seconds: float) -> None:
    command = [sys.executable, "-c", CHILD, str(path), str(signals), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= signals


def test_thousands_of_signals_leave_whole_transactions_and_a_shelf_that_goes_on(memory: Path) -> None:
    _strike(memory / "a.shelf", 2000, 120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_many_more_signals(tmp_path: Path, memory: Path, where: str) -> None:
    _strike((tmp_path if where == "disk" else memory) / "a.shelf", 50_000, 1500)
