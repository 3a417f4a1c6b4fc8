"""Every single system call of a save fails once: the save succeeds or says so, and nothing durable is touched."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.engine import faults

from .scenarios import SCENARIOS, Replacing, SameStep, Scenario
from .states import load_identity

Record = Callable[[str, object], None]


def count_calls(scenario: type[Scenario], root: Path, options: holdfast.Options, call: str = "any") -> int:
    """Calls of a kind in a save in which nothing fails."""
    root.mkdir()
    healthy = scenario(root, options)
    with faults.traced() as events, faults.injected(f"{call}:1000000:EIO"):
        healthy.act()
        calls = faults.count_calls()
    healthy.close()
    return calls if call == "any" else sum(event.call == call for event in events)


def open_descriptors() -> int:
    gc.collect()  # an exception that somebody still looks at keeps its frames, and what they opened
    return len(os.listdir("/proc/self/fd"))


def act_under(fault: str, scenario: Scenario) -> holdfast.SaveFailed | None:
    """The save under a fault. Any error but `SaveFailed` is the test's failure."""
    with faults.injected(fault):
        try:
            scenario.act()
        except holdfast.SaveFailed as error:
            return error
    return None


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.__name__)
def scenario(request: pytest.FixtureRequest) -> type[Scenario]:
    found: type[Scenario] = request.param
    return found


@pytest.fixture(params=["spare-later", "spare-now"])
def _spares(request: pytest.FixtureRequest, scenario: type[Scenario]) -> None:
    if request.param == "spare-now":
        if not issubclass(scenario, SameStep.__bases__[0]):
            pytest.skip("nothing is recycled outside of a run")
        request.getfixturevalue("spare_now")


@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
def test_each_call_failing(
    ram: Path, way: holdfast.Options, scenario: type[Scenario], code: str, record_property: Record
) -> None:
    calls = count_calls(scenario, ram / "healthy", way)
    assert calls >= 8
    descriptors = open_descriptors()
    for nth in range(1, calls + 1):
        place = ram / str(nth)
        place.mkdir()
        case = scenario(place, way)
        error = act_under(f"any:{nth}:{code}", case)
        if error is not None:
            assert isinstance(error, holdfast.StorageFull) == (code == "ENOSPC")
            assert isinstance(error.__cause__, OSError)
            assert error.filename
            # With one call failing the clean-up has none to fail of its own.
            assert case.leftovers() == []
        case.check(failed=error is not None)
        case.again()
        case.close()
    del error
    assert open_descriptors() == descriptors
    record_property("crash-faults", calls)


def test_each_write_falling_short(
    ram: Path, way: holdfast.Options, scenario: type[Scenario], record_property: Record
) -> None:
    """A short count is no error: the rest is written, and the save succeeds."""
    writes = count_calls(scenario, ram / "healthy", way, "write")
    assert writes >= 2
    for nth in range(1, writes + 1):
        place = ram / str(nth)
        place.mkdir()
        case = scenario(place, way)
        assert act_under(f"write:{nth}:short", case) is None
        case.check(failed=False)
        case.close()
    record_property("crash-faults", writes)


@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
def test_a_device_that_dies_at_each_call(
    ram: Path, way: holdfast.Options, scenario: type[Scenario], code: str, record_property: Record
) -> None:
    """From one call on every one fails, those of the clean-up too. When the device is back, so is everything."""
    calls = count_calls(scenario, ram / "healthy", way)
    for nth in range(1, calls + 1):
        place = ram / str(nth)
        place.mkdir()
        case = scenario(place, way)
        error = act_under(f"any:{nth}:{code}+", case)
        case.check_readable()
        case.again()
        case.close()
        if nth < calls // 2:
            assert error is not None
    record_property("crash-faults", calls)
