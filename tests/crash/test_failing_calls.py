"""Every single system call of a save fails once: the save succeeds or says so; what is durable stays."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import everystep
from everystep.engine import faults, fs
from support.crashes.failing_saves import SCENARIOS, Recycling, Replacing, SameStep, Scenario
from support.crashes.recovery import leftovers
from support.states.identified_states import blank_state, identify, load_identity, make_state

Record = Callable[[str, object], None]


def count_calls(scenario: type[Scenario], root: Path, options: everystep.Options, call: str = "any") -> int:
    """Calls of a kind in a save in which nothing fails."""
    root.mkdir()
    healthy = scenario(root, options)
    with faults.traced() as events, faults.injected(f"{call}:1000000:EIO"):
        healthy.act()
        calls = faults.count_calls()
    healthy.close()
    return calls if call == "any" else sum(event.call == call for event in events)


def open_descriptors() -> int:
    gc.collect()  # an exception that is still referenced keeps its frames, and what they opened
    return len(os.listdir("/proc/self/fd"))


def act_under(fault: str, scenario: Scenario) -> everystep.SaveFailed | None:
    """The save under a fault. Any error but `SaveFailed` is the test's failure."""
    with faults.injected(fault):
        try:
            scenario.act()
        except everystep.SaveFailed as error:
            return error
    return None


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.__name__)
def scenario(request: pytest.FixtureRequest) -> type[Scenario]:
    found: type[Scenario] = request.param
    return found


@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
def test_each_call_failing(
    fast: Path, way: everystep.Options, scenario: type[Scenario], code: str, record_property: Record
) -> None:
    calls = count_calls(scenario, fast / "healthy", way)
    assert calls >= 7
    descriptors = open_descriptors()
    for nth in range(1, calls + 1):
        place = fast / str(nth)
        place.mkdir()
        case = scenario(place, way)
        error = act_under(f"any:{nth}:{code}", case)
        if error is not None:
            assert isinstance(error, everystep.errors.StorageFull) == (code == "ENOSPC")
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
    fast: Path, way: everystep.Options, scenario: type[Scenario], record_property: Record
) -> None:
    """A short count is no error: the rest is written, and the save succeeds."""
    writes = count_calls(scenario, fast / "healthy", way, "write")
    assert writes >= 1
    for nth in range(1, writes + 1):
        place = fast / str(nth)
        place.mkdir()
        case = scenario(place, way)
        assert act_under(f"write:{nth}:short", case) is None
        case.check(failed=False)
        case.close()
    record_property("crash-faults", writes)


def test_a_device_that_dies_at_each_call(
    fast: Path, way: everystep.Options, scenario: type[Scenario], record_property: Record
) -> None:
    """From one call on every one fails, the clean-up's too. When the device is back, so is everything."""
    calls = count_calls(scenario, fast / "healthy", way)
    for nth in range(1, calls + 1):
        place = fast / str(nth)
        place.mkdir()
        case = scenario(place, way)
        error = act_under(f"any:{nth}:EIO+", case)
        case.check_readable()
        case.again()
        case.close()
        if nth < calls // 2:
            assert error is not None
    record_property("crash-faults", calls)


@pytest.mark.usefixtures("spare_now")
@pytest.mark.parametrize("scenario", [Recycling, SameStep], indirect=True)
@pytest.mark.parametrize("lasting", ["", "+"])
def test_each_call_failing_where_spares_are_made_at_once(
    fast: Path, way: everystep.Options, scenario: type[Scenario], lasting: str, record_property: Record
) -> None:
    calls = count_calls(scenario, fast / "healthy", way)
    assert calls >= 7
    for nth in range(1, calls + 1):
        place = fast / str(nth)
        place.mkdir()
        case = scenario(place, way)
        error = act_under(f"any:{nth}:EIO{lasting}", case)
        if not lasting:
            case.check(failed=error is not None)
        case.check_readable()
        case.again()
        case.close()
    record_property("crash-faults", calls)


@pytest.mark.parametrize("scenario", [Replacing, SameStep], indirect=True)
def test_a_replaced_checkpoint_survives_a_failed_commit_that_cannot_be_undone(
    fast: Path, way: everystep.Options, scenario: type[Scenario]
) -> None:
    """The sync fails, then the exchange back: either of the two may be on the disk, so both stay."""
    case = scenario(fast, way)
    # The names in a spare are durable already; a new directory is synced before the one that holds it.
    nth = 1 if scenario is SameStep else 2
    assert act_under(f"sync_dir:{nth}:EIO,exchange:2:EIO", case) is not None
    case.check_readable()
    (partial,) = case.leftovers()
    found = load_identity_of_leftover(fast, partial)
    assert found[1] == 0 or found == (1, 0)  # the old one, whole
    case.again()
    case.close()


def load_identity_of_leftover(root: Path, name: str) -> tuple[int, int]:
    """Moves a leftover to where it can be read, reads it, and moves it back."""
    (where,) = root.rglob(name)
    shown = where.with_name("moved")
    where.rename(shown)
    try:
        return load_identity(str(shown))
    finally:
        shown.rename(where)


def test_interrupted_between_commit_and_sync_keeps_what_was_replaced(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the worst moment: the names are exchanged, and not durable."""
    case = Replacing(fast, everystep.Options())
    real = fs.exchange

    def exchange(a: str, b: str) -> None:
        real(a, b)
        raise KeyboardInterrupt

    monkeypatch.setattr(fs, "exchange", exchange)
    with pytest.raises(KeyboardInterrupt):
        case.act()
    monkeypatch.undo()
    case.check_readable()
    assert load_identity_of_leftover(fast, "model.partial") == (1, 0)
    case.again()


@pytest.mark.parametrize("lasting", ["", "+"])
@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
def test_each_call_failing_while_a_run_is_opened(
    fast: Path, code: str, lasting: str, record_property: Record
) -> None:
    """Opening makes directories and sweeps. Failed, it lets go of the lock, and can be tried again."""

    def prepare(root: Path) -> str:
        run = root / "new" / "run"
        os.makedirs(run)
        with everystep.Checkpointer(run, make_state(1), mode="sync") as checkpointer:
            checkpointer.save(1)
        for name in ("step-000000000002.partial", "step-000000000003.retired"):
            shutil.copytree(run / "step-000000000001", run / name)
        return str(run)

    run = prepare(fast / "healthy")
    with faults.injected("any:1000000:EIO"):
        everystep.Checkpointer(run, None, mode="sync").close()
        calls = faults.count_calls()
    assert calls > 6
    for nth in range(1, calls + 1):
        run = prepare(fast / str(nth))
        expected = everystep.errors.StorageFull if code == "ENOSPC" else everystep.SaveFailed
        with faults.injected(f"any:{nth}:{code}{lasting}"), contextlib.suppress(expected):
            everystep.Checkpointer(run, None, mode="sync").close()
        target = blank_state()
        with everystep.Checkpointer(run, target, mode="sync") as checkpointer:
            assert checkpointer.restore() == 1
            assert identify(target) == (1, 0)
            assert leftovers(run) == []
    record_property("crash-faults", calls)


def test_each_call_failing_while_a_new_run_is_made(fast: Path, record_property: Record) -> None:
    nth = 0
    failed = True
    while failed:
        nth += 1
        run = fast / str(nth) / "deep" / "run"
        failed = False
        with faults.injected(f"any:{nth}:EIO"):
            try:
                everystep.Checkpointer(run, None, mode="sync").close()
            except everystep.SaveFailed:
                failed = True
        with everystep.Checkpointer(run, make_state(1), mode="sync") as checkpointer:
            checkpointer.save(1)
        assert load_identity(str(run)) == (1, 0)
    assert nth > 5
    record_property("crash-faults", nth)
