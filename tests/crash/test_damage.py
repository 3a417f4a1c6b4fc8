"""Damage of any kind, anywhere: a typed error that names file and leaf, or the checkpoint before it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import everystep
from everystep.store import step_name
from everystep.store.read.checkpoint import open_newest
from support.states.identified_states import blank_state, identify, make_state

MANIFEST = "manifest.json"
SHARD = "r00000.v0.safetensors"
TWO_FILES = everystep.Options(backend="buffered", small_nbytes=0)
"""Writes even a tiny state as a large one: shard and manifest."""


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of a shard, and the leaf whose bytes it holds; None for header and padding."""

    start: int
    stop: int
    leaf: str | None


def regions(checkpoint: Path) -> list[Region]:
    """Everything that a shard consists of, in order, without gaps."""
    with open_newest(checkpoint) as opened:
        part = opened._parts.root.part
    (shard,) = part.files
    data = (checkpoint / SHARD).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = len(data[: 8 + length].rstrip(b" "))
    found = [Region(0, 8, None), Region(8, text, None), Region(text, shard.header_nbytes, None)]
    at = shard.header_nbytes
    for leaf in sorted(part.leaves, key=lambda leaf: leaf.fragments[0].offset):
        (fragment,) = leaf.fragments
        if fragment.offset > at:
            found.append(Region(at, fragment.offset, None))
        found.append(Region(fragment.offset, fragment.offset + fragment.nbytes, leaf.name))
        at = fragment.offset + fragment.nbytes
    if at < shard.nbytes:
        found.append(Region(at, shard.nbytes, None))
    assert all(before.stop == after.start for before, after in itertools.pairwise(found))
    return [region for region in found if region.start < region.stop]


def flip(path: Path, offset: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 1 << bit]))


def assert_corrupt(checkpoint: Path, file: str, leaf: str | None) -> None:
    with pytest.raises(everystep.CorruptCheckpoint) as caught:
        everystep.load(checkpoint)
    assert caught.value.path == str(checkpoint / file)
    assert caught.value.leaf == leaf
    assert str(checkpoint / file) in str(caught.value)
    if leaf is not None:
        assert repr(leaf) in str(caught.value)


@pytest.fixture
def checkpoint(ram: Path) -> Path:
    """Of two files."""
    path = ram / "checkpoint"
    everystep.save(path, make_state(1), options=TWO_FILES)
    return path


@pytest.fixture
def single(ram: Path) -> Path:
    """Of one file."""
    path = ram / "single"
    everystep.save(path, make_state(1))
    assert os.listdir(path) == [SHARD]
    return path


# --- flipped bits ---------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_a_shard_names_file_and_leaf(checkpoint: Path) -> None:
    """Every third byte, with a bit in turn, and every bit at the edges of what the file consists of."""
    stretches = regions(checkpoint)
    assert {region.leaf for region in stretches} == {None, "wide", "narrow.u8", "narrow.f64"}
    for region in stretches:
        edges = {region.start, region.stop - 1}
        for offset in sorted({*edges, *range(region.start, region.stop, 3)}):
            for bit in range(8) if offset in edges else (offset * 5 % 8,):
                flip(checkpoint / SHARD, offset, bit)
                assert_corrupt(checkpoint, SHARD, region.leaf)
                flip(checkpoint / SHARD, offset, bit)
    assert identify(everystep.load(checkpoint)) == (1, 0)


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(checkpoint: Path) -> None:
    manifest = checkpoint / MANIFEST
    for offset in range(manifest.stat().st_size):
        bit = offset * 3 % 8
        flip(manifest, offset, bit)
        assert_corrupt(checkpoint, MANIFEST, None)
        flip(manifest, offset, bit)
    assert identify(everystep.load(checkpoint)) == (1, 0)


def test_a_flipped_bit_in_any_byte_of_a_checkpoint_of_one_file_is_found(single: Path) -> None:
    """Every byte: header with the manifest, leaves, padding."""
    for region in regions(single):
        for offset in range(region.start, region.stop):
            bit = offset * 5 % 8
            flip(single / SHARD, offset, bit)
            assert_corrupt(single, SHARD, region.leaf)
            flip(single / SHARD, offset, bit)
    assert identify(everystep.load(single)) == (1, 0)


def test_verify_finds_flipped_bits_in_a_checkpoint_of_one_file(single: Path) -> None:
    for offset in range(0, (single / SHARD).stat().st_size, 37):
        flip(single / SHARD, offset, 6)
        report = everystep.verify(single)
        assert {problem.file for problem in report.problems} == {str(single / SHARD)}
        flip(single / SHARD, offset, 6)
    assert everystep.verify(single).intact


def test_a_flipped_bit_in_a_large_shard_is_found_in_its_chunk(tmp_path: Path) -> None:
    """Several chunks and windows, read past the page cache where there is a way."""
    path = tmp_path / "large"
    everystep.save(path, make_state(1, 0, wide=900_000))
    for region in regions(path):
        middle = (region.start + region.stop) // 2
        for offset in sorted(
            {region.start, middle, region.stop - 1, *range(region.start, region.stop, 500_001)}
        ):
            flip(path / SHARD, offset, offset % 8)
            assert_corrupt(path, SHARD, region.leaf)
            report = everystep.verify(path)
            assert {(p.file, p.leaf) for p in report.problems} == {(str(path / SHARD), region.leaf)}
            flip(path / SHARD, offset, offset % 8)
    assert everystep.verify(path).intact


def test_verify_finds_every_flipped_bit_and_raises_nothing(checkpoint: Path) -> None:
    for region in regions(checkpoint):
        for offset in {region.start, (region.start + region.stop) // 2, region.stop - 1}:
            flip(checkpoint / SHARD, offset, 6)
            report = everystep.verify(checkpoint)
            assert not report.intact
            assert {problem.file for problem in report.problems} == {str(checkpoint / SHARD)}
            assert region.leaf in {problem.leaf for problem in report.problems}
            flip(checkpoint / SHARD, offset, 6)
    for offset in range(0, (checkpoint / MANIFEST).stat().st_size, 97):
        flip(checkpoint / MANIFEST, offset, 6)
        report = everystep.verify(checkpoint)
        assert [problem.file for problem in report.problems] == [str(checkpoint / MANIFEST)]
        flip(checkpoint / MANIFEST, offset, 6)
    assert everystep.verify(checkpoint).intact


def test_verify_lists_all_that_is_damaged(checkpoint: Path) -> None:
    for region in regions(checkpoint):
        if region.leaf is not None:
            flip(checkpoint / SHARD, region.start, 0)
    found = {problem.leaf for problem in everystep.verify(checkpoint).problems}
    assert found == {"wide", "narrow.u8", "narrow.f64"}


def test_what_is_not_damaged_can_still_be_read(checkpoint: Path) -> None:
    (wide,) = (region for region in regions(checkpoint) if region.leaf == "wide")
    flip(checkpoint / SHARD, wide.start, 0)
    with everystep.open(checkpoint) as opened:
        read = opened.read("narrow.*")
        assert read["narrow.f64"].tobytes() == make_state(1)["narrow"]["f64"].tobytes()
        with pytest.raises(everystep.CorruptCheckpoint):
            opened["wide"][1:2]


def test_a_flipped_bit_reaches_no_slice(checkpoint: Path) -> None:
    """Also where only a part of a leaf is asked for, and the damage is in another part of its chunk."""
    (wide,) = (region for region in regions(checkpoint) if region.leaf == "wide")
    flip(checkpoint / SHARD, wide.stop - 1, 7)
    with everystep.open(checkpoint) as opened, pytest.raises(everystep.CorruptCheckpoint) as caught:
        opened["wide"][0:4]
    assert caught.value.leaf == "wide"


# --- files that are not what they were ------------------------------------------------------------


def truncate(nbytes_of: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path, nbytes_of(path.stat().st_size))

    return damage


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\n")


def append_block(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(4096))


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def take_from_other(path: Path) -> None:
    """The file of the same name out of a checkpoint of the same layout."""
    other = path.parent.with_name("other")
    everystep.save(other, make_state(7), step=7, options=TWO_FILES)
    shutil.copyfile(other / path.name, path)


FILE_DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": truncate(lambda nbytes: 0),
    "one byte": truncate(lambda nbytes: 1),
    "seven bytes": truncate(lambda nbytes: 7),
    "a block": truncate(lambda nbytes: min(4096, nbytes - 1)),
    "half": truncate(lambda nbytes: nbytes // 2),
    "a sector short": truncate(lambda nbytes: nbytes - 512),
    "a byte short": truncate(lambda nbytes: nbytes - 1),
    "a byte more": append,
    "a block more": append_block,
    "zeros": zero,
    "missing": Path.unlink,
    "a directory": make_directory,
    "of another checkpoint": take_from_other,
}


def blamed(file: str, damage: Callable[[Path], None]) -> str:
    """The file that an error names. A manifest of another checkpoint is whole: the shard does not fit it."""
    return SHARD if damage is take_from_other else file


IN_SHARD_AND_MANIFEST = pytest.mark.parametrize("file", [SHARD, MANIFEST])
EACH_DAMAGE = pytest.mark.parametrize("damage", FILE_DAMAGE.values(), ids=FILE_DAMAGE)


@IN_SHARD_AND_MANIFEST
@EACH_DAMAGE
def test_a_damaged_file_is_a_typed_error(checkpoint: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(checkpoint / file)
    with pytest.raises(everystep.EverystepError) as caught:
        everystep.load(checkpoint)
    # Of what is not even a file, the system says why it cannot be read.
    kinds = (
        (everystep.errors.ReadFailed, everystep.CorruptCheckpoint)
        if damage is make_directory
        else everystep.CorruptCheckpoint
    )
    assert isinstance(caught.value, kinds)
    missing = damage is Path.unlink
    assert isinstance(caught.value, everystep.errors.IncompleteCheckpoint) == missing
    if not (missing and file == MANIFEST):
        assert str(checkpoint / blamed(file, damage)) in str(caught.value)


@IN_SHARD_AND_MANIFEST
@EACH_DAMAGE
def test_verify_reports_a_damaged_file(checkpoint: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(checkpoint / file)
    report = everystep.verify(checkpoint)
    assert not report.intact
    # Without a manifest by itself, it could be in the shard.
    shown = SHARD if file == MANIFEST and damage is Path.unlink else blamed(file, damage)
    assert {problem.file for problem in report.problems} == {str(checkpoint / shown)}


@pytest.mark.parametrize("name", [name for name in FILE_DAMAGE if name != "of another checkpoint"])
def test_a_damaged_checkpoint_of_one_file_is_a_typed_error(single: Path, name: str) -> None:
    FILE_DAMAGE[name](single / SHARD)
    with pytest.raises(everystep.EverystepError) as caught:
        everystep.load(single)
    missing = name == "missing"
    assert isinstance(caught.value, everystep.CheckpointNotFound if missing else everystep.CorruptCheckpoint)
    if missing:
        with pytest.raises(everystep.CheckpointNotFound):  # there is nothing at that path to report on
            everystep.verify(single)
    else:
        assert caught.value.path == str(single / SHARD)
        assert {problem.file for problem in everystep.verify(single).problems} == {str(single / SHARD)}


@EACH_DAMAGE
def test_a_restore_falls_back_from_a_single_file(ram: Path, damage: Callable[[Path], None]) -> None:
    run = ram / "run"
    with everystep.Checkpointer(run, None, mode="sync") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.state = make_state(step)
            checkpointer.save(step)
    damage(run / step_name(3) / SHARD)
    target = blank_state()
    with everystep.Checkpointer(run, target, mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning, match="passing over step 3"):
            assert checkpointer.restore() == 2
        assert identify(target) == (2, 0)
        checkpointer.state = make_state(3, 1)
        checkpointer.save(3)
    assert identify(everystep.load(run / step_name(3))) == (3, 1)


@IN_SHARD_AND_MANIFEST
@EACH_DAMAGE
def test_a_restore_falls_back_with_a_warning(ram: Path, file: str, damage: Callable[[Path], None]) -> None:
    run = ram / "run"
    with everystep.Checkpointer(run, None, mode="sync", options=TWO_FILES) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.state = make_state(step)
            checkpointer.save(step)
    damage(run / step_name(3) / file)
    target = blank_state()
    with everystep.Checkpointer(run, target, mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning, match="passing over step 3") as told:
            assert checkpointer.restore() == 2
        assert identify(target) == (2, 0)
        assert any(str(run / step_name(3)) in str(warning.message) for warning in told)
        # What was passed over is replaced by the next save of that step.
        checkpointer.state = make_state(3, 1)
        checkpointer.save(3)
        checkpointer.state = target = blank_state()
        assert checkpointer.restore() == 3
        assert identify(target) == (3, 1)


def test_a_missing_shard_names_the_leaf_that_needs_it(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    with pytest.raises(everystep.errors.IncompleteCheckpoint) as caught:
        everystep.load(checkpoint)
    assert caught.value.path == str(checkpoint / SHARD)
    assert caught.value.leaf in {"wide", "narrow.u8", "narrow.f64"}


def test_a_truncated_shard_names_the_first_leaf_that_is_cut(checkpoint: Path) -> None:
    leaves = [region for region in regions(checkpoint) if region.leaf is not None]
    for region in reversed(leaves):
        os.truncate(checkpoint / SHARD, region.stop - 1)
        assert_corrupt(checkpoint, SHARD, region.leaf)


def test_both_files_of_another_checkpoint_are_not_that_step(ram: Path) -> None:
    """A directory put in another's place is whole in itself; in a run, it is not the step its name says."""
    run = ram / "run"
    with everystep.Checkpointer(run, None, mode="sync") as checkpointer:
        for step in (1, 2):
            checkpointer.state = make_state(step)
            checkpointer.save(step)
    shutil.rmtree(run / step_name(2))
    shutil.copytree(run / step_name(1), run / step_name(2))
    target = blank_state()
    with everystep.Checkpointer(run, target, mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning, match="passing over step 2"):
            assert checkpointer.restore() == 1
        assert identify(target) == (1, 0)


def test_when_nothing_is_whole_a_restore_says_so_and_starts_nothing(ram: Path) -> None:
    run = ram / "run"
    with everystep.Checkpointer(run, None, mode="sync", options=TWO_FILES) as checkpointer:
        for step in (1, 2):
            checkpointer.state = make_state(step)
            checkpointer.save(step)
    flip(run / step_name(1) / SHARD, 5000, 0)
    (run / step_name(2) / MANIFEST).unlink()
    with (
        everystep.Checkpointer(run, blank_state(), mode="sync") as checkpointer,
        pytest.warns(RuntimeWarning),
        pytest.raises(everystep.CorruptCheckpoint, match="none of the 2 checkpoints is intact"),
    ):
        checkpointer.restore()
    assert (run / step_name(1) / SHARD).exists()  # left for people to look at


def test_strangers_in_a_run_do_no_harm(ram: Path) -> None:
    run = ram / "run"
    with everystep.Checkpointer(run, make_state(1), mode="sync") as checkpointer:
        checkpointer.save(1)
    (run / "notes.txt").write_text("mine")
    (run / "step-000000000002").write_text("a file, not a checkpoint")
    (run / "step-3").mkdir()
    (run / "step-000000000009.partial.old").mkdir()
    target = blank_state()
    with everystep.Checkpointer(run, target, mode="sync") as checkpointer:
        assert checkpointer.restore() == 1
        assert identify(target) == (1, 0)
        checkpointer.state = make_state(3)
        checkpointer.save(3)
    assert (run / "notes.txt").read_text() == "mine"
    assert (run / "step-3").is_dir()
    assert (run / "step-000000000009.partial.old").is_dir()
