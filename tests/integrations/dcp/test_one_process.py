"""DCP without a process group: what is saved comes back, and is an Everystep checkpoint."""

from __future__ import annotations

import io
import os
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import everystep
from everystep.integrations.dcp import Reader, Writer
from support.foreign.dcp_states import Odd, assert_same, blank, everything, failures, load, model, save
from support.processes.command import command

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Made once: no test changes it."""
    state, path = everything(), tmp_path_factory.mktemp("dcp") / "run" / "step-000000000042"
    save(state, path)
    return state, path


Saved = tuple[dict[str, Any], Path]


def test_everything_comes_back(saved: Saved) -> None:
    state, path = saved
    assert_same(load(state, path), state)


def test_it_is_a_checkpoint_like_any_other(saved: Saved, tmp_path: Path) -> None:
    state, path = saved
    assert everystep.verify(path).problems == ()
    with everystep.open(path) as checkpoint:
        assert checkpoint.step == 42
        assert checkpoint.values["progress.epoch"] == 3
        assert torch.equal(checkpoint.read("wide")["wide"], state["wide"])
        assert torch.equal(checkpoint["wide"][7:9], state["wide"][7:9])
        assert "model.0.weight" in checkpoint
    loaded = everystep.load(path)
    # Its pickle, byte for byte: what DCP's planner made of an object that no value can be.
    odd = loaded["progress"].pop("odd")
    assert torch.load(io.BytesIO(odd.tobytes()), weights_only=False) == Odd(0)
    wanted = {**state, "progress": {key: item for key, item in state["progress"].items() if key != "odd"}}
    assert_same({**loaded}, wanted)
    for words in (["show", str(path)], ["verify", str(path)], ["ls", str(path.parent)]):
        assert command(*words).code == 0
    assert command("export", path, tmp_path / "all.safetensors").code == 0
    assert torch.equal(safetensors.torch.load_file(tmp_path / "all.safetensors")["wide"], state["wide"])


def test_everystep_restores_it_in_place(saved: Saved) -> None:
    state, path = saved
    target = blank({key: item for key, item in state.items() if key != "progress"})
    target["progress"] = {}
    everystep.load(path, into=target, select=["model.*", "wide"])
    assert_same(target["model"], state["model"])
    assert torch.equal(target["wide"], state["wide"])


def test_what_dcp_stores_twice_is_restored_to_weights_that_are_tied(tmp_path: Path) -> None:
    """DCP stores tied weights under each name; the module that ties them takes both, as they are equal."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 8)
            self.head = torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

    source, target, apart = Tied(), Tied(), Tied()
    save({"model": source.state_dict()}, tmp_path / "c")
    everystep.load(tmp_path / "c", into={"model": target})
    assert torch.equal(target.head.weight, source.embed.weight)
    assert target.head.weight is target.embed.weight
    apart.head.weight = torch.nn.Parameter(apart.embed.weight + 1)
    save({"model": apart.state_dict()}, tmp_path / "d")
    with pytest.raises(everystep.StateMismatch, match="stored apart"):
        everystep.load(tmp_path / "d", into={"model": target})
    assert torch.equal(target.head.weight, source.embed.weight)


def test_its_shard_is_a_safetensors_file_and_its_manifest_holds_no_pickle(saved: Saved) -> None:
    state, path = saved
    assert sorted(item.name for item in path.iterdir()) == ["manifest.json", "r00000.v0.safetensors"]
    tensors = safetensors.torch.load_file(path / "r00000.v0.safetensors")
    assert torch.equal(tensors["model.0.weight"], state["model"]["0.weight"])
    # One object needs pickle, and its bytes are a leaf of their own.
    blobs = [name for name, tensor in tensors.items() if tensor.dtype == torch.uint8]
    assert sorted(name for name in blobs if not name.startswith("__pad__")) == ["bytes", "progress.odd"]
    data = (path / "manifest.json").read_bytes()
    assert b"torch" in data
    assert pickle.PROTO + b"\x02" not in data


def test_metadata_is_what_dcp_gave(saved: Saved) -> None:
    state, path = saved
    made = dcp.save(state, storage_writer=Writer(path, overwrite=True), no_dist=True)
    found = Reader(path).read_metadata()
    assert found.state_dict_metadata == made.state_dict_metadata
    assert found.planner_data == made.planner_data
    assert found.version == made.version
    assert isinstance(found.state_dict_metadata["progress.rate"], BytesStorageMetadata)
    assert isinstance(found.state_dict_metadata["bytes"], TensorStorageMetadata)
    parameter = found.state_dict_metadata["parameter"]
    assert isinstance(parameter, TensorStorageMetadata)
    assert parameter.properties.requires_grad


def test_a_state_is_rebuilt_from_nothing(saved: Saved) -> None:
    state, path = saved
    assert_same(_load_state_dict_from_keys(storage_reader=Reader(path))["mixed"], state["mixed"])
    only = _load_state_dict_from_keys({"model"}, storage_reader=Reader(path))
    assert_same(only, {"model": dict(state["model"])})


def test_models_and_optimizers_by_dcps_own_helpers(tmp_path: Path) -> None:
    trained, optimizer = model(1)
    weights, moments = get_state_dict(trained, optimizer)
    save({"model": weights, "optimizer": moments}, tmp_path / "first")
    fresh, other = model(2)
    weights, moments = get_state_dict(fresh, other)
    target = {"model": weights, "optimizer": moments}
    dcp.load(target, storage_reader=Reader(tmp_path / "first"), no_dist=True)
    set_state_dict(fresh, other, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert_same(fresh.state_dict(), trained.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())


def test_other_types_and_shared_memory_are_filled_by_copies(tmp_path: Path) -> None:
    stored = {"a": torch.randn(40, 5), "b": torch.randn(40, 5), "tail": torch.randn(200)}
    save(stored, tmp_path / "first")
    both = torch.zeros(40, 5)
    target = {"a": both, "b": both, "tail": torch.zeros(200, dtype=torch.float64)}
    before = target["tail"]._version
    dcp.load(target, storage_reader=Reader(tmp_path / "first"), no_dist=True)
    assert torch.equal(target["tail"], stored["tail"].double())
    assert target["tail"]._version > before
    assert torch.equal(both, stored["a"]) or torch.equal(both, stored["b"])


def test_a_graph_finds_out_that_its_tensors_were_filled(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "first")
    weight = torch.zeros(3, requires_grad=True)
    loss = weight.square().sum()
    dcp.load({"w": weight}, storage_reader=Reader(tmp_path / "first"), no_dist=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_planners_with_ways_of_their_own(tmp_path: Path) -> None:
    class Halves(DefaultSavePlanner):
        """Stores tensors in half precision, and objects as text."""

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            if write_item.type == WriteItemType.BYTE_IO:
                return io.BytesIO(repr(self.lookup_object(write_item.index)).encode())
            found: Any = super().resolve_data(write_item)
            return found.half()  # type: ignore[no-any-return]

    class Texts(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.state_dict[read_item.dest_index.fqn] = value.read().decode()

    flat = {"w": torch.randn(8), "n": 5}
    writer = Writer(tmp_path / "first")
    dcp.save(flat, storage_writer=writer, planner=Halves(flatten_state_dict=False), no_dist=True)
    target: dict[str, Any] = {"w": torch.zeros(8), "n": None}
    planner = Texts(flatten_state_dict=False)
    dcp.load(target, storage_reader=Reader(tmp_path / "first"), planner=planner, no_dist=True)
    assert torch.equal(target["w"], flat["w"].half().float())
    assert planner.state_dict["n"] == "5"
    assert Reader(tmp_path / "first").read_metadata().planner_data is None


def test_paths_that_do_not_go_together_lie_flat(tmp_path: Path) -> None:
    class Tangled(DefaultSavePlanner):
        """As when ranks have different things at the same place."""

        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {"a": ("a",), "a.b": ("a", "b")}
            return plans, metadata

    state = {"a": torch.ones(2), "a.b": 7}
    dcp.save(state, storage_writer=Writer(tmp_path / "first"), planner=Tangled(), no_dist=True)
    assert Reader(tmp_path / "first").read_metadata().planner_data == {"a": ("a",), "a.b": ("a", "b")}
    assert_same(load(state, tmp_path / "first"), state)
    assert list(everystep.load(tmp_path / "first")) == ["a", "a.b"]


def test_checkpoints_of_everystep_are_read_too(tmp_path: Path) -> None:
    tied = torch.randn(4, 4)
    state = {
        "model": {"w": torch.randn(20, 3), "tied": tied, "again": tied},
        "epoch": 4,
        "l": [torch.ones(2)],
        "blobs": [bytes(100_000), bytearray(b"x" * 100_000), 3],
    }
    everystep.save(tmp_path / "native", state)
    assert_same(load(state, tmp_path / "native"), state)


def test_a_run_of_a_checkpointer_is_read_by_dcps_own_helpers(tmp_path: Path) -> None:
    trained, optimizer = model(1)
    state = {"model": trained, "optimizer": optimizer, "rng": everystep.per_rank(everystep.rng())}
    with everystep.Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.save(1)
    path = tmp_path / "run" / "step-000000000001"
    fresh, other = model(2)
    weights, moments = get_state_dict(fresh, other)
    target = {"model": weights, "optimizer": moments}
    dcp.load(target, storage_reader=Reader(path), no_dist=True)
    set_state_dict(fresh, other, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert_same(fresh.state_dict(), trained.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())
    # And without a state to fill.
    found = _load_state_dict_from_keys(storage_reader=Reader(path))
    assert list(found) == ["model", "optimizer"]
    assert torch.equal(
        found["optimizer"]["state"]["0.weight"]["exp_avg"], optimizer.state[trained[0].weight]["exp_avg"]
    )


def test_the_path_may_be_dcps_checkpoint_id(tmp_path: Path) -> None:
    writer, reader = Writer(), Reader()
    for step in (1, 2):
        state = {"w": torch.full((5,), float(step))}
        path = tmp_path / f"step-{step:012d}"
        dcp.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
        target = {"w": torch.zeros(5)}
        dcp.load(target, checkpoint_id=path, storage_reader=reader, no_dist=True)
        assert_same(target, state)
        assert everystep.open(path).step == step
    assert Writer.validate_checkpoint_id(tmp_path / "new" / "deep")
    assert not Writer.validate_checkpoint_id("s3://bucket/x")
    assert not Reader.validate_checkpoint_id(tmp_path / "step-000000000001" / "manifest.json" / "x")
    with pytest.raises(ValueError, match="file systems"):
        Writer("s3://bucket/x")
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({}, storage_writer=Writer(), no_dist=True)
    assert "no path" in str(failures(caught.value)[0])


def test_a_reader_serves_several_threads(tmp_path: Path) -> None:
    states = {name: {"w": torch.full((5,), float(name))} for name in ("1", "2")}
    for name, state in states.items():
        save(state, tmp_path / name)
    reader, meeting = Reader(), threading.Barrier(2)

    class Meeting(DefaultLoadPlanner):
        """Both have been told where to read, and then have read what is there, before either goes on."""

        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            meeting.wait(60)
            super().set_up_planner(*args, **kwargs)

        def finish_plan(self, central_plan: Any) -> Any:
            meeting.wait(60)
            return super().finish_plan(central_plan)

    def filled(name: str) -> dict[str, Any]:
        target = {"w": torch.zeros(5)}
        reader.reset(tmp_path / name)
        meeting.wait(60)
        dcp.load(target, storage_reader=reader, planner=Meeting(), no_dist=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        for name, target in zip(states, pool.map(filled, states), strict=True):
            assert_same(target, states[name])


def test_what_a_failed_load_has_open_goes_with_its_thread(saved: Saved) -> None:
    _, path = saved
    reader = Reader(path)

    def fail() -> Reader:
        with pytest.raises(dcp.api.CheckpointException, match="stranger"):
            dcp.load({"stranger": torch.zeros(1)}, storage_reader=reader, no_dist=True)
        other: Reader = pickle.loads(pickle.dumps(reader))
        return other

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(fail).result()
    files = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    assert [file for file in files if str(path) in file] == []
    assert other.checkpoint_id == str(path)


def test_a_load_in_the_middle_of_another_needs_its_own_reader(tmp_path: Path) -> None:
    for name in ("1", "2"):
        save({"w": torch.full((5,), float(name))}, tmp_path / name)
    reader = Reader()

    class Nested(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            dcp.load({"w": torch.zeros(5)}, checkpoint_id=tmp_path / "2", storage_reader=reader, no_dist=True)
            return super().create_local_plan()

    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(
            {"w": torch.zeros(5)},
            checkpoint_id=tmp_path / "1",
            storage_reader=reader,
            planner=Nested(),
            no_dist=True,
        )
    assert isinstance(failures(caught.value)[0], everystep.errors.ReadFailed)


def test_step_and_metrics_are_those_given(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "first", step=7, metrics={"loss": 0.5})
    with everystep.open(tmp_path / "first") as checkpoint:
        assert (checkpoint.step, checkpoint.metrics) == (7, {"loss": 0.5})
    with pytest.raises(ValueError, match="step must be"):
        Writer(tmp_path / "second", step=-1)
    with pytest.raises(TypeError, match="must be a number"):
        Writer(tmp_path / "second", metrics={"loss": "small"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="planner decides"):
        Writer(tmp_path / "second", options=everystep.Options(writers="node"))


def test_saves_in_the_background(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 401), "epoch": 3}
    for number in range(2):
        saving = dcp.async_save(state, storage_writer=Writer(tmp_path / str(number)), no_dist=True)
        assert isinstance(saving, Future)
        wanted = {"w": state["w"].clone(), "epoch": 3}
        state["w"].add_(1)  # staged: what is saved is what was there
        saving.result(timeout=60)
        assert_same(load(wanted, tmp_path / str(number)), wanted)


def test_both_are_what_dcp_asks_for(tmp_path: Path) -> None:
    assert isinstance(Writer(tmp_path), StorageWriter)
    assert isinstance(Reader(tmp_path), StorageReader)
    again = pickle.loads(pickle.dumps(Writer(tmp_path / "x", step=3)))
    dcp.save({"w": torch.ones(1)}, storage_writer=again, no_dist=True)
    assert everystep.open(tmp_path / "x").step == 3
