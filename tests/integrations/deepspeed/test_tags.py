"""The directory that DeepSpeed saves to, without DeepSpeed: what a kill, damage and a second save leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep.engine import faults
from everystep.integrations.deepspeed import tags
from everystep.integrations.shared.folders import damage_of

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@contextmanager
def begin(path: str) -> Iterator[tags.TagTransaction]:
    tags.sweep(os.path.dirname(path))
    with tags.TagTransaction(path) as transaction:
        transaction.make()
        yield transaction


def save(folder: Path, tag: str, step: int) -> None:
    path = str(folder / tag)
    with begin(path) as transaction:
        for name in (MODEL, OPTIMIZER):
            everystep.save(os.path.join(transaction.path, name), {"w": np.full(10, step)}, step=step)
        transaction.commit()
    tags.write_latest(str(folder), tag)


def test_a_tag_appears_when_it_is_published(tmp_path: Path) -> None:
    with begin(str(tmp_path / "a")) as transaction:
        everystep.save(os.path.join(transaction.path, MODEL), {"w": np.zeros(3)})
        assert [path.name for path in tmp_path.iterdir()] == [".a.partial"]
        transaction.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert tags.read_latest(str(tmp_path)) is None
    assert tags.newest_first(str(tmp_path)) == []


def test_a_save_without_files_makes_no_tag(tmp_path: Path) -> None:
    with begin(str(tmp_path / "a")) as transaction:
        transaction.commit()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    everystep.save(tmp_path / ".a.partial" / MODEL, {"w": np.zeros(3)})
    save(tmp_path, "b", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "latest"]


def test_what_another_save_is_writing_stays(tmp_path: Path) -> None:
    with begin(str(tmp_path / "a")) as transaction:
        everystep.save(os.path.join(transaction.path, MODEL), {"w": np.zeros(3)})
        save(tmp_path, "b", 1)
        with pytest.raises(everystep.errors.Locked, match="another process"):
            save(tmp_path, "a", 2)
        transaction.commit()
    assert (tmp_path / "a" / MODEL).is_dir()


def test_a_file_in_the_place_of_a_tag_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(everystep.CheckpointExists):
        save(tmp_path, "a", 1)
    assert (tmp_path / "a").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_replaced_tag_keeps_its_files_until_its_new_name_is_durable(tmp_path: Path) -> None:
    """Killed after the exchange of names, the next save syncs them before it removes the old files."""
    save(tmp_path, "a", 1)
    pid = os.fork()
    if pid == 0:
        faults.install(faults.Fault("exchange", 1, "kill"))
        save(tmp_path, "a", 2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / ".a.partial").is_dir()
    with faults.traced() as events:
        tags.sweep(str(tmp_path))
    calls = [event.call for event in events]
    assert calls.index("sync_dir") < calls.index("unlink")


def test_any_failing_call_leaves_a_tag_that_is_complete(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    for call in range(1, 200):
        faults.install(faults.Fault("any", call, "error", 5))
        try:
            save(tmp_path, "a", 2)
        except OSError:
            failed = True
        else:
            failed = False
        finally:
            faults.install()
        assert tags.read_latest(str(tmp_path)) == "a"
        files = tags.files_of(str(tmp_path / "a"))
        assert len(files) == 2
        found = {int(everystep.load(path)["w"][0]) for path in files}
        assert found in ({1}, {2})
        if not failed:
            break
    assert found == {2}
    assert call > 20
    save(tmp_path, "a", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


def test_files_of_others_stay_in_a_tag_that_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    save(tmp_path, "a", 2)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    (tmp_path / "a" / "folder").mkdir()
    with pytest.raises(everystep.CheckpointExists, match="folder"):
        save(tmp_path, "a", 3)
    assert everystep.load(tmp_path / "a" / MODEL)["w"][0] == 2


def test_damage_is_named_and_tags_are_ordered_by_step(tmp_path: Path) -> None:
    for step, tag in enumerate(("z", "a", "m"), start=8):
        save(tmp_path, tag, step)
    assert tags.newest_first(str(tmp_path)) == [str(tmp_path / tag) for tag in "maz"]
    tags.write_latest(str(tmp_path), "a")  # as after going back to it
    assert tags.newest_first(str(tmp_path)) == [str(tmp_path / tag) for tag in "amz"]
    files = tags.files_of(str(tmp_path / "m"))
    assert damage_of(files) is None
    (shard,) = Path(files[1]).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    damage = damage_of(files)
    assert damage is not None
    assert OPTIMIZER in damage


def test_an_empty_latest_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("")
    assert tags.read_latest(str(tmp_path)) is None
    assert tags.newest_first(str(tmp_path)) == []
