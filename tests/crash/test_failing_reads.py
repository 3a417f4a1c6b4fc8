"""Every call of a read fails: once, and it is read again or raised as it is; for good, and that is damage."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from crash.conftest import USABLE
from everystep.engine import faults
from everystep.store import step_name
from everystep.store.read.read_errors import open_stored
from support.processes.child_processes import Pipe, run_forked
from support.states.identified_states import blank_state, identify, make_state

Record = Callable[[str, object], None]

LARGE = 700_000
"""Elements; more than is read through the page cache in one go: direct reads in windows are tried too."""


@pytest.fixture(params=[100, LARGE], ids=["small", "windows"])
def wide(request: pytest.FixtureRequest) -> int:
    width: int = request.param
    return width


@pytest.fixture(params=USABLE)
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYSTEP_BACKEND", request.param)


@pytest.fixture
def run(tmp_path: Path, wide: int) -> Path:
    """Two checkpoints."""
    where = tmp_path / "run"
    with everystep.Checkpointer(where, None, mode="sync") as checkpointer:
        for step in (1, 2):
            checkpointer.state = make_state(step, 0, wide)
            checkpointer.save(step)
    return where


def count_calls(read: Callable[[], object]) -> int:
    with faults.injected("any:1000000:EIO"):
        read()
        return faults.count_calls()


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("action", ["EIO", "short"])
def test_each_call_of_a_load_failing(run: Path, wide: int, action: str, record_property: Record) -> None:
    path = run / step_name(2)
    fresh = count_calls(lambda: everystep.load(path))
    assert fresh >= 2
    for nth in range(1, fresh + 1):
        for into in (None, blank_state(wide)):
            with faults.injected(f"any:{nth}:{action}"):
                assert identify(everystep.load(path, into)) == (2, 0)  # it was read again
                assert into is None or identify(into) == (2, 0)
        if action == "EIO":
            with faults.injected(f"any:{nth}:EIO+"), pytest.raises(everystep.errors.ReadFailed) as caught:
                everystep.load(path)
            assert caught.value.errno == errno.EIO
            assert str(path) in str(caught.value)
    record_property("crash-faults", 2 * fresh)


@pytest.mark.usefixtures("_backend")
def test_each_call_of_a_restore_failing(run: Path, wide: int, record_property: Record) -> None:
    """One bad read costs nothing: what may be a moment's failure is tried again."""
    with everystep.Checkpointer(run, blank_state(wide), mode="sync") as checkpointer:
        calls = count_calls(checkpointer.restore)
        for nth in range(1, calls + 1):
            checkpointer.state = target = blank_state(wide)
            with faults.injected(f"any:{nth}:EIO"), warnings.catch_warnings():
                warnings.simplefilter("error")
                assert checkpointer.restore() == 2
            assert identify(target) == (2, 0)
    record_property("crash-faults", calls)


OTHERS = ["EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ESTALE", "EINTR", "EBUSY", "EACCES", "ETIMEDOUT"]
"""Errors that say nothing about the stored bytes."""


def refused(checkpointer: everystep.Checkpointer, code: str) -> bool:
    """Whether a restore raised this error; else it has restored the newest. It never falls back."""
    raised: everystep.errors.ReadFailed | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            assert checkpointer.restore() == 2
        except everystep.errors.ReadFailed as error:
            raised = error
    if raised is None:
        assert identify(checkpointer.state) == (2, 0)
        return False
    assert raised.errno == getattr(errno, code)
    assert checkpointer.path in str(raised)
    lacking = code in ("EMFILE", "ENFILE", "ENOMEM", "EAGAIN")
    assert isinstance(raised, everystep.errors.OutOfResources) is lacking
    return True


@pytest.mark.parametrize("code", OTHERS)
def test_what_says_nothing_about_the_bytes_is_raised_and_never_taken_for_damage(
    run: Path, wide: int, code: str, record_property: Record
) -> None:
    with everystep.Checkpointer(run, blank_state(wide), mode="sync") as checkpointer:
        calls = count_calls(checkpointer.restore)
        for nth in range(1, calls + 1):
            checkpointer.state = blank_state(wide)
            with faults.injected(f"any:{nth}:{code}"):
                # The engine itself tries again what was only interrupted.
                assert refused(checkpointer, code) or code in ("EAGAIN", "EINTR")
        assert checkpointer.steps == [1, 2]
    record_property("crash-faults", calls)


BY_PYTHON = ["open.open_stored", "reader_lock.share_directory", "shard_reader.require_regular"]
"""Calls of a restore that do not go through the seam."""
BY_PYTHON_OF_SEVERAL_FILES = [*BY_PYTHON, "shard_reader.open_stored"]
"""The header of a small checkpoint is read once: it is the manifest."""


@pytest.mark.parametrize(
    ("wide", "call"),
    [
        *(pytest.param(100, call, id=f"{call}-small") for call in BY_PYTHON),
        *(pytest.param(LARGE, call, id=f"{call}-windows") for call in BY_PYTHON_OF_SEVERAL_FILES),
    ],
    indirect=["wide"],
)
@pytest.mark.parametrize("code", ["EIO", *OTHERS])
def test_calls_of_pythons_own_are_no_exception(
    run: Path, wide: int, call: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = call.split(".")
    home = importlib.import_module(f"everystep.store.read.{module}")
    real = getattr(home, name)
    failed: list[str] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(call)
            raise OSError(getattr(errno, code), "injected", args[0])
        return real(*args, **kwargs)

    with everystep.Checkpointer(run, blank_state(wide), mode="sync") as checkpointer:
        monkeypatch.setattr(home, name, once)
        assert refused(checkpointer, code) is (code != "EIO")
        assert failed
        checkpointer.state = make_state(2, 1, wide)
        if code != "EIO":
            with pytest.raises(everystep.errors.RunInUse):  # nothing was restored, so nothing is written over
                checkpointer.save(2)
            assert identify(everystep.load(run)) == (2, 0)


@pytest.mark.parametrize("wide", [LARGE], indirect=True, ids=["windows"])
@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_AS"])
def test_a_process_short_of_descriptors_or_of_memory_does_not_lose_its_newest_checkpoint(
    run: Path, wide: int, limit: str
) -> None:
    """The kernel's own limits, as batch systems set them."""

    def work(pipe: Pipe) -> None:
        everystep.load(run)  # every module is there
        checkpointer = everystep.Checkpointer(run, blank_state(wide), mode="sync")
        number = getattr(resource, limit)
        soft, hard = resource.getrlimit(number)
        if limit == "RLIMIT_NOFILE":
            taken = os.open("/dev/null", os.O_RDONLY)
            os.close(taken)
            low = taken
        else:
            low = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (64 << 10)
        resource.setrlimit(number, (low, hard))
        said = "restored"
        try:
            checkpointer.restore()
        except (everystep.errors.OutOfResources, MemoryError) as error:
            said = type(error).__name__
        finally:
            resource.setrlimit(number, (soft, hard))
        pipe.send(said)
        assert checkpointer.restore() == 2

    (said,) = run_forked(work)
    assert said in ("OutOfResources", "MemoryError", "restored")
    assert limit == "RLIMIT_AS" or said == "OutOfResources"


@pytest.mark.usefixtures("_backend")
def test_a_device_that_reads_nothing_is_an_error_not_a_new_start(run: Path, wide: int) -> None:
    with everystep.Checkpointer(run, blank_state(wide), mode="sync") as checkpointer:
        with (
            faults.injected("read:1:EIO+"),
            pytest.warns(RuntimeWarning),
            pytest.raises(everystep.EverystepError),
        ):
            checkpointer.restore()
        assert checkpointer.restore() == 2


@pytest.mark.usefixtures("_backend")
def test_a_slice_that_cannot_be_read_is_an_error(run: Path, wide: int) -> None:
    with everystep.open(run / step_name(2)) as checkpoint:
        calls = count_calls(lambda: checkpoint["wide"][3:70])
        for nth in range(1, calls + 1):
            with (
                faults.injected(f"any:{nth}:EIO+"),
                pytest.raises(everystep.errors.ReadFailed, match="safetensors"),
            ):
                checkpoint["wide"][3:70]
            for once in ("short", "EIO"):
                with faults.injected(f"any:{nth}:{once}"):
                    part = checkpoint["wide"][3:70]
                assert part.tobytes() == make_state(2, 0, wide)["wide"][3:70].tobytes()


@pytest.mark.parametrize("wide", [100], indirect=True)
def test_an_unreadable_manifest_is_passed_over(run: Path, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read by Python itself, not through the seam."""
    newest = (run / step_name(2)).stat().st_ino

    def failing(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path).parent.stat().st_ino == newest:
            raise OSError(errno.EIO, "injected", path)
        return open_stored(path, *args, **kwargs)

    monkeypatch.setattr("everystep.store.read.open.open_stored", failing)
    with pytest.raises(everystep.errors.ReadFailed) as caught:
        everystep.load(run / step_name(2))
    assert str(run / step_name(2)) in str(caught.value)
    target = blank_state(wide)
    with (
        everystep.Checkpointer(run, target, mode="sync") as checkpointer,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        assert checkpointer.restore() == 1
    assert any("passing over step 2" in str(warning.message) for warning in told)
    assert identify(target) == (1, 0)


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("wide", [LARGE], indirect=True)
def test_reads_that_all_fall_short_still_give_every_byte(run: Path, wide: int) -> None:
    for nth in (1, 2):
        with faults.injected(",".join(f"read:{number}:short" for number in range(nth, 40, 2))):
            assert identify(everystep.load(run / step_name(2))) == (2, 0)


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("wide", [LARGE], indirect=True)
def test_writes_that_all_fall_short_still_store_every_byte(tmp_path: Path, wide: int) -> None:
    for nth in (1, 2):
        with faults.injected(",".join(f"write:{number}:short" for number in range(nth, 40, 2))):
            everystep.save(tmp_path / str(nth), make_state(nth, 0, wide))
        loaded = everystep.load(tmp_path / str(nth))
        assert identify(loaded) == (nth, 0)
        assert np.isnan(loaded["wide"]).any()
