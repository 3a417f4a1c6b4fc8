"""A program that used ``FileSystemWriter`` moves over by changing a name: arguments, ids, words of errors."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat

import everystep
from everystep.integrations.dcp import Reader, Writer
from everystep.integrations.dcp import ignored_arguments as their_tuning
from support.foreign.dcp_states import assert_same, failures, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

STATE = {"w": torch.arange(3000.0), "epoch": 3}
PAGE = Path(__file__).parents[3] / "docs" / "dcp.md"


def test_arguments_that_tune_the_other_writer_are_ignored_with_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(their_tuning, "_said", type(their_tuning._said)())
    theirs = {
        "single_file_per_rank": False,
        "sync_files": False,
        "thread_count": 8,
        "per_thread_copy_ahead": 1,
        "cache_staged_state_dict": True,
        "serialization_format": SerializationFormat.TORCH_SAVE,
    }
    dcp.FileSystemWriter(tmp_path / "theirs", **theirs)  # they are what it takes
    with pytest.warns(UserWarning, match=r"ignores .*thread_count.*always syncs") as told:
        writer = Writer(tmp_path / "c", **theirs)
    assert told[0].filename == __file__
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    assert_same(load(STATE, tmp_path / "c"), STATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Writer(tmp_path / "d", **theirs)
        Writer(tmp_path / "e")


def test_extensions_are_none_or_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Writer(tmp_path / "empty", _extensions=[])
        writer = Writer(tmp_path / "c", _extensions=None)
        reader = Reader(tmp_path / "c", _extension_registry=None)
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    found = {"w": torch.zeros(3000), "epoch": 0}
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert_same(found, STATE)
    with pytest.raises(TypeError, match=r"Writer takes no _extensions.* Leave it out"):
        Writer(tmp_path, _extensions=[object()])
    with pytest.raises(TypeError, match=r"Reader takes no _extension_registry.* Leave it out"):
        Reader(tmp_path, _extension_registry=ExtensionRegistry())


def test_any_other_argument_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'threads'"):
        Writer(tmp_path, threads=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'overwrit'"):
        Writer(tmp_path, thread_count=3, overwrit=True)


def test_saves_and_loads_have_ids(tmp_path: Path) -> None:
    class Noting(DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            self.meta = storage_meta
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    writer, planner = Writer(tmp_path / "a"), Noting()
    first = writer.save_id
    dcp.save(STATE, storage_writer=writer, planner=planner, no_dist=True)
    assert writer.save_id == first == planner.meta.save_id
    assert everystep.open(tmp_path / "a").id == first
    dcp.save(STATE, storage_writer=writer, checkpoint_id=tmp_path / "b", planner=planner, no_dist=True)
    second = writer.save_id
    assert second == planner.meta.save_id == everystep.open(tmp_path / "b").id != first
    writer.reset()
    assert writer.save_id != second

    reader = Reader(tmp_path / "a")
    loading = reader.load_id
    found = reader.read_metadata().storage_meta
    assert found is not None
    assert (found.save_id, found.load_id) == (first, loading)
    reader.reset(tmp_path / "b")
    assert reader.load_id != loading
    assert len({writer.save_id, Writer().save_id, reader.load_id, Reader().load_id}) == 4


def test_a_writer_used_again_without_a_word_makes_another_id(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", overwrite=True)
    ids = []
    for _ in range(2):
        dcp.save(STATE, storage_writer=writer, no_dist=True)
        ids.append(everystep.open(tmp_path / "a").id)
    assert ids[0] != ids[1] == writer.save_id


def test_the_error_for_an_existing_checkpoint_has_the_words_of_dcp(tmp_path: Path) -> None:
    save(STATE, tmp_path / "c")
    with pytest.raises(dcp.api.CheckpointException, match="Checkpoint already exists") as caught:
        save(STATE, tmp_path / "c")
    assert isinstance(failures(caught.value)[0], everystep.CheckpointExists)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_code_on_the_page_runs() -> None:
    model = torch.nn.Linear(3, 2)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names: dict[str, Any] = {"state": {"model": model.state_dict()}, "path": "runs/x/step-000000000100"}
    dcp.save(names["state"], storage_writer=dcp.FileSystemWriter("old/step-100"))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec"), names)
        if "future" in names:
            names.pop("future").result()
    for step in (100, 200, 300):
        assert_same(dict(everystep.load(f"runs/x/step-{step:012d}")["model"]), wanted)
    assert_same(torch.load("model.pt")["model"], wanted)
    assert_same(names["state"], {"model": wanted})
    assert os.path.exists("runs/x/step-000000000300")
