"""Checkpoints in a framework's folder: which one is resumed from, and how they are removed."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep.errors import CorruptCheckpoint
from everystep.integrations.shared.folders import by_rank_zero, newest_intact, numbered, remove


def saved(folder: Path, *numbers: int) -> list[tuple[int, str]]:
    for number in numbers:
        everystep.save(folder / f"checkpoint-{number}", {"w": np.full(8, number)}, step=number)
    return numbered(str(folder), "checkpoint-")


def damage(checkpoint: Path) -> None:
    (shard,) = checkpoint.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def test_only_entries_with_that_name_and_a_number_count_in_the_order_of_numbers(tmp_path: Path) -> None:
    for name in (
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-9.everystep-removed",
        "checkpoint-x",
        "my-checkpoint-3",
    ):
        (tmp_path / name).mkdir()
    assert [number for number, _ in numbered(str(tmp_path), "checkpoint-")] == [9, 10]
    assert numbered(str(tmp_path / "missing"), "checkpoint-") == []


def test_the_newest_is_found_and_one_without_a_commit_is_passed_over(tmp_path: Path) -> None:
    there = saved(tmp_path, 2, 10)
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-12" / "model.safetensors").write_bytes(b"of the framework")
    there = numbered(str(tmp_path), "checkpoint-")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_intact(there, str(tmp_path)) == str(tmp_path / "checkpoint-10")


def test_the_frameworks_own_are_taken_as_they_are_when_they_are_the_newest(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    foreign = {str(tmp_path / "checkpoint-5")}
    there = saved(tmp_path, 2)
    assert newest_intact(there, str(tmp_path), foreign) == str(tmp_path / "checkpoint-5")
    there = saved(tmp_path, 7)
    assert newest_intact(there, str(tmp_path), foreign) == str(tmp_path / "checkpoint-7")


def test_damage_is_passed_over_with_a_warning_and_is_an_error_if_nothing_is_left(tmp_path: Path) -> None:
    there = saved(tmp_path, 1, 2)
    damage(tmp_path / "checkpoint-2")
    with pytest.warns(RuntimeWarning, match="passing over .*checkpoint-2: .*safetensors"):
        assert newest_intact(there, str(tmp_path)) == str(tmp_path / "checkpoint-1")
    damage(tmp_path / "checkpoint-1")
    with (
        pytest.warns(RuntimeWarning, match="passing over .*checkpoint-1"),
        pytest.raises(CorruptCheckpoint, match="no checkpoint is intact"),
    ):
        newest_intact(there, str(tmp_path))
    assert newest_intact([], str(tmp_path)) is None


def test_all_ranks_hear_what_rank_zero_found(tmp_path: Path) -> None:
    def look() -> str:
        raise CorruptCheckpoint("no checkpoint is intact", path="here")

    sent: list[list[object]] = []
    with pytest.raises(CorruptCheckpoint, match="in here: no checkpoint is intact"):
        by_rank_zero(look, 0, lambda found: sent.append(found) or found)
    with pytest.raises(CorruptCheckpoint, match="in here: no checkpoint is intact"):
        by_rank_zero(look, 1, lambda found: sent[0])
    with pytest.raises(PermissionError):
        by_rank_zero(look, 1, lambda found: [PermissionError()])
    assert by_rank_zero(lambda: "a", 0, lambda found: found) == "a"
    assert by_rank_zero(look, 1, lambda found: ["a"]) == "a"


def test_a_removed_checkpoint_is_gone_and_what_it_links_to_is_not(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / "last").symlink_to(tmp_path / "checkpoint-1")
    remove(tmp_path / "last")
    assert (tmp_path / "checkpoint-1").exists()
    remove(f"{tmp_path}/checkpoint-1/")
    remove(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_removal_has_left_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 2)

    def killed(path: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(tmp_path / "checkpoint-1")
    assert numbered(str(tmp_path), "checkpoint-") == [(2, str(tmp_path / "checkpoint-2"))]
    saved(tmp_path, 1)
    remove(tmp_path / "checkpoint-1")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
