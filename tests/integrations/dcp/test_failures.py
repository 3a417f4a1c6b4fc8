"""Saves that fail leave nothing; what is damaged is named; a power cut leaves all or nothing."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import everystep
from everystep.engine import faults
from everystep.integrations.dcp import Reader, Writer
from everystep.universal.dcp.record import DcpRecord
from support.crashes.power_cuts import Budget, Disk
from support.foreign.dcp_states import assert_same, failures, flip_in, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

STATE = {"w": torch.arange(3000.0), "epoch": 3}
OTHER = {"w": torch.arange(3000.0) + 7, "epoch": 4}


def _names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_what_is_there_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    save(STATE, tmp_path / "first")
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(OTHER, tmp_path / "first")
    assert isinstance(failures(caught.value)[0], everystep.CheckpointExists)
    assert_same(load(STATE, tmp_path / "first"), STATE)
    save(OTHER, tmp_path / "first", overwrite=True)
    assert_same(load(OTHER, tmp_path / "first"), OTHER)
    assert _names(tmp_path) == ["first"]


def test_any_call_that_fails_leaves_nothing_or_all(tmp_path: Path) -> None:
    path = tmp_path / "run" / "first"
    nth = 0
    while True:
        nth += 1
        faults.install(*faults.parse(f"any:{nth}:EIO"))
        try:
            save(STATE, path)
            failed = None
        except dcp.api.CheckpointException as error:
            failed = failures(error)[0]
        finally:
            calls = faults.count_calls()
            faults.install()
        if failed is None:
            assert_same(load(STATE, path), STATE)
            if calls < nth:
                break
            everystep.save(path, {}, overwrite=True)  # the fault hit what need not succeed
            continue
        assert isinstance(failed, everystep.SaveFailed), failed
        assert not path.exists()
        save(STATE, path)  # and the next one succeeds
        assert _names(path.parent) == ["first"]
        for item in path.iterdir():
            item.unlink()
        path.rmdir()
    assert nth > 8


def test_a_planner_that_keeps_its_plans_goes_on_after_a_failure(tmp_path: Path) -> None:
    class Keeping(DefaultSavePlanner):
        """What it keeps is known by the name of its class, which is therefore its own."""

    (tmp_path / "file").touch()
    for path in ("file/first", "second", "third"):
        planner, writer = Keeping(enable_plan_caching=True), Writer(tmp_path / path)
        if path == "file/first":
            with pytest.raises(dcp.api.CheckpointException, match="not a directory"):
                dcp.save(STATE, storage_writer=writer, planner=planner, no_dist=True)
        else:
            dcp.save(STATE, storage_writer=writer, planner=planner, no_dist=True)
            assert_same(load(STATE, tmp_path / path), STATE)


def test_a_plan_that_was_kept_for_another_storage_is_reported(tmp_path: Path) -> None:
    class Alternating(DefaultSavePlanner):
        pass

    class Derived(DefaultSavePlanner):
        pass

    files = dcp.FileSystemWriter(tmp_path / "files")
    dcp.save(STATE, storage_writer=files, planner=Alternating(enable_plan_caching=True), no_dist=True)
    writer = Writer(tmp_path / "first")
    with pytest.raises(dcp.api.CheckpointException, match="another kind of storage writer"):
        dcp.save(STATE, storage_writer=writer, planner=Alternating(enable_plan_caching=True), no_dist=True)
    assert _names(tmp_path) == ["files"]
    dcp.save(STATE, storage_writer=writer, planner=Derived(enable_plan_caching=True), no_dist=True)
    assert_same(load(STATE, tmp_path / "first"), STATE)


def test_a_failure_of_the_planner_leaves_nothing(tmp_path: Path) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise ZeroDivisionError("of the planner")

    writer = Writer(tmp_path / "first")
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(STATE, storage_writer=writer, planner=Failing(), no_dist=True)
    assert isinstance(failures(caught.value)[0], ZeroDivisionError)
    assert _names(tmp_path) == []
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    assert_same(load(STATE, tmp_path / "first"), STATE)


def test_a_save_that_dcp_abandons_is_given_up(tmp_path: Path) -> None:
    """When another rank fails, DCP never calls `finish`, and tells the writer nothing."""

    abandoned = _written(tmp_path / "first")
    save(STATE, tmp_path / "first")  # while the other is still held
    assert _names(tmp_path) == ["first"]
    with pytest.raises(everystep.SaveFailed, match="abandoned"):
        abandoned.finish(dcp.metadata.Metadata({}), [[]])
    assert_same(load(STATE, tmp_path / "first"), STATE)


def test_one_save_at_a_time_to_a_path(tmp_path: Path) -> None:
    class Another(DefaultSavePlanner):
        """Saves to the same path while it is asked for data."""

        def resolve_data(self, write_item: Any) -> Any:
            with pytest.raises(dcp.api.CheckpointException) as caught:
                save(OTHER, tmp_path / "first")
            refused.append(failures(caught.value)[0])
            return super().resolve_data(write_item)

    refused: list[BaseException] = []
    dcp.save(STATE, storage_writer=Writer(tmp_path / "first"), planner=Another(), no_dist=True)
    assert {type(error) for error in refused} == {everystep.errors.Locked}
    assert_same(load(STATE, tmp_path / "first"), STATE)


def test_a_writer_that_is_saving_cannot_be_given_another_path(tmp_path: Path) -> None:
    class Held(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            asked.set()
            assert going_on.wait(60)
            return super().resolve_data(write_item)

    asked, going_on, writer = threading.Event(), threading.Event(), Writer(tmp_path / "first")
    saving: Any = dcp.async_save(STATE, storage_writer=writer, planner=Held(), no_dist=True)
    assert asked.wait(60)
    with pytest.raises(everystep.errors.Locked, match="another Writer"):
        dcp.save(OTHER, storage_writer=writer, checkpoint_id=tmp_path / "second", no_dist=True)
    going_on.set()
    saving.result(60)
    assert_same(load(STATE, tmp_path / "first"), STATE)
    dcp.save(OTHER, storage_writer=writer, checkpoint_id=tmp_path / "second", no_dist=True)
    assert_same(load(OTHER, tmp_path / "second"), OTHER)


def test_a_save_goes_where_its_own_thread_wants_it(tmp_path: Path) -> None:
    writer = Writer()
    writer.reset(tmp_path / "first")
    other = threading.Thread(target=writer.reset, args=(tmp_path / "second",))
    other.start()
    other.join()
    made = dcp.save(STATE, storage_writer=writer, no_dist=True)
    assert made.storage_meta is not None
    assert made.storage_meta.checkpoint_id == str(tmp_path / "first")
    assert _names(tmp_path) == ["first"]


def test_what_it_has_left_goes_with_the_writer(tmp_path: Path) -> None:
    writer = _written(tmp_path / "first")
    del writer
    assert _names(tmp_path) == []
    writer = _written(tmp_path / "first")
    writer.reset()
    assert _names(tmp_path) == []


def _written(path: Path) -> Writer:
    """A writer that DCP has called for everything but the end."""
    writer, planner = Writer(path), DefaultSavePlanner()
    planner.set_up_planner(STATE, is_coordinator=True)
    writer.set_up_storage_writer(True, rank=0)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    writer.write_data(writer.prepare_global_plan(plans)[0], planner)
    assert _names(path.parent) == [f"{path.name}.partial"]
    return writer


def test_states_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save({"model": {"sparse": torch.eye(3).to_sparse()}}, tmp_path / "first")
    failed = failures(caught.value)[0]
    assert isinstance(failed, everystep.UnsupportedState)
    assert "model.sparse" in str(failed)
    with pytest.raises(ValueError, match="use_collectives"):
        dcp.save(STATE, storage_writer=Writer(tmp_path / "first"), no_dist=True, use_collectives=False)
    assert _names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("@1.w", torch.ones(2)),
        ("\ud800", torch.ones(2)),
        ("w", torch.ones([1] * 65)),
        ("w", torch.empty(2**62, 0)),
    ],
    ids=["name of a rank", "no text", "dimensions", "beyond memory"],
)
def test_what_readers_refuse_is_not_saved(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save({name: tensor}, tmp_path / "first")
    failed = failures(caught.value)[0]
    assert isinstance(failed, everystep.UnsupportedState)
    assert repr(name)[1:-1] in str(failed)
    assert _names(tmp_path) == []


def test_damage_is_named(tmp_path: Path) -> None:
    save(STATE, tmp_path / "first")
    shard = tmp_path / "first" / "r00000.v0.safetensors"
    flip_in(shard, "w")
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(STATE, tmp_path / "first")
    failed = failures(caught.value)[0]
    assert isinstance(failed, everystep.CorruptCheckpoint)
    assert (failed.path, failed.leaf) == (str(shard), "w")
    load(STATE, tmp_path / "first", verify=False)
    shard.unlink()
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(STATE, tmp_path / "first")
    assert isinstance(failures(caught.value)[0], everystep.errors.IncompleteCheckpoint)
    manifest = tmp_path / "first" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"epoch"', b'"Epoch"'))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(STATE, tmp_path / "first")
    assert isinstance(failures(caught.value)[0], everystep.CorruptCheckpoint)
    with pytest.raises(everystep.CheckpointNotFound):
        Reader(tmp_path / "none").read_metadata()
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(STATE, tmp_path / "none")
    assert isinstance(failures(caught.value)[0], everystep.CheckpointNotFound)


def test_a_checkpoint_of_dcps_own_writer_is_not_taken_for_damage(tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "files"), no_dist=True)
    with pytest.raises(everystep.CheckpointNotFound, match="FileSystemReader"):
        Reader(tmp_path / "files").read_metadata()


def test_an_array_is_not_read_as_the_bytes_of_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that lies about its leaves must not lead to memory of the wrong size."""
    monkeypatch.setattr(
        "everystep.integrations.dcp.writer.DcpRecord", lambda **known: DcpRecord(**{**known, "bytes": ("w",)})
    )
    save(STATE, tmp_path / "first")
    with pytest.raises(everystep.CorruptCheckpoint, match="not the bytes of an object"):
        Reader(tmp_path / "first").read_metadata()


@pytest.mark.parametrize("replace", [False, True], ids=["new", "replaced"])
def test_a_power_cut_leaves_all_or_nothing(tmp_path: Path, replace: bool) -> None:
    root, after = tmp_path / "disk", tmp_path / "after"
    root.mkdir()
    after.mkdir()
    with faults.traced() as first:
        if replace:
            save(STATE, root / "first")
    with faults.traced() as second:
        save(OTHER, root / "first", overwrite=replace, options=everystep.Options(small_nbytes=0))
    # What happens above makes the root itself durable, as the model assumes.
    earlier, events = ([event for event in some if _inside(event, root)] for some in (first, second))
    disk, rng, tried = Disk(root), random.Random(0), set()
    for event in earlier:
        disk.replay(event)
    for number, event in enumerate(events, 1):
        disk.replay(event)
        reported = number == len(events)
        for image in disk.crashes(Budget(), rng):
            if (image.digest(), reported) in tried:
                continue
            tried.add((image.digest(), reported))
            image.write(after)
            if (after / "first").exists():
                found = load(OTHER, after / "first")
                assert_same(found, STATE if found["epoch"] == 3 and replace and not reported else OTHER)
            else:
                assert not replace
                assert not reported
    assert len(tried) > 40


def _inside(event: faults.TracedCall, root: Path) -> bool:
    return event.path.startswith(str(root))


@pytest.mark.parametrize("call", ["prepare_local_plan", "write_data", "finish"])
def test_a_link_that_is_re_pointed_leads_no_writer_into_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for name in ("first", "other"):
        save(OTHER, tmp_path / name / "step-000000000001")
    other = tmp_path / "other" / "step-000000000001"
    before = {file: (file.stat().st_ino, file.read_bytes()) for file in other.iterdir()}
    current = tmp_path / "current"
    current.symlink_to(tmp_path / "first")
    real = getattr(Writer, call)

    def re_point(self: Writer, *args: Any, **kwargs: Any) -> Any:
        current.unlink()
        current.symlink_to(tmp_path / "other")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Writer, call, re_point)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(STATE, current / "step-000000000001", overwrite=True)
    assert isinstance(failures(caught.value)[0], everystep.errors.RunMoved)
    assert {file: (file.stat().st_ino, file.read_bytes()) for file in other.iterdir()} == before
    assert _names(tmp_path / "other") == _names(tmp_path / "first") == ["step-000000000001"]
    assert_same(load(OTHER, tmp_path / "first" / "step-000000000001"), OTHER)
