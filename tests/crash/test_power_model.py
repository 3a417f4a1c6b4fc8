"""The model of a power cut says what it should: all that may be lost can be lost, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

from everystep.engine import faults, fs
from everystep.engine.faults import TracedCall
from support.crashes.disk_objects import GARBAGE, render
from support.crashes.power_cuts import Budget, Disk, Image, image_of

ROOT = Path("/model")
OLD, NEW = b"o" * 1024, b"n" * 1024


def event(
    call: str, path: str, other: str = "", offset: int = 0, data: bytes = b"", nbytes: int = 0
) -> TracedCall:
    second = f"{ROOT}/{other}" if other else ""
    return TracedCall(
        call, f"{ROOT}/{path}".rstrip("/"), second, offset, nbytes, data, creates=call == "open"
    )


def trees(
    *events: TracedCall, before: dict[str, bytes | None] | None = None
) -> list[dict[str, bytes | None]]:
    """Every distinct tree that a power cut after these operations may leave."""
    disk = Disk(ROOT, Image(before or {}))
    for item in events:
        disk.replay(item)
    budget = Budget(names=1024, torn=200)
    found = {image.digest(): dict(image.tree) for image in disk.crashes(budget, random.Random(0))}
    return list(found.values())


def written(path: str, data: bytes, offset: int = 0) -> list[TracedCall]:
    return [event("open", path), event("write", path, offset=offset, data=data)]


def test_what_was_synced_is_there() -> None:
    synced = [*written("f", NEW), event("sync", "f"), event("sync_dir", "")]
    assert trees(*synced) == [{"f": NEW}]


def test_a_synced_file_may_lack_its_name() -> None:
    found = trees(*written("f", NEW), event("sync", "f"))
    assert {} in found
    assert {"f": NEW} in found
    assert len(found) == 2


def test_a_synced_name_may_lack_its_data() -> None:
    found = trees(*written("f", NEW), event("sync_dir", ""))
    contents = {tree["f"] for tree in found}
    assert all("f" in tree for tree in found)
    assert b"" in contents  # nothing arrived
    assert bytes(1024) in contents  # only the size did
    assert GARBAGE * 1024 in contents  # only the size did, and shows what the device held there
    assert NEW[:512] + bytes(512) in contents  # the first sector
    assert bytes(512) + NEW[512:] in contents  # the second, before the first


def test_writing_over_data_leaves_each_sector_old_or_new() -> None:
    opened = TracedCall("open", f"{ROOT}/f", "", 0, 0, b"", creates=False)
    found = trees(opened, event("write", "f", data=NEW), before={"f": OLD})
    assert sorted(tree["f"] or b"" for tree in found) == sorted(
        [OLD, NEW, NEW[:512] + OLD[512:], OLD[:512] + NEW[512:]]
    )


def test_what_was_preallocated_reads_as_zeros_or_data() -> None:
    found = trees(
        event("open", "f"),
        event("fallocate", "f", nbytes=1024),
        event("sync", "f"),
        event("write", "f", data=NEW),
        event("sync_dir", ""),
    )
    assert {tree["f"] for tree in found} == {
        bytes(1024),
        NEW,
        NEW[:512] + bytes(512),
        bytes(512) + NEW[512:],
    }


def test_a_lost_truncation_leaves_the_old_tail() -> None:
    opened = TracedCall("open", f"{ROOT}/f", "", 0, 0, b"", creates=False)
    found = trees(opened, event("truncate", "f", nbytes=512), before={"f": OLD})
    assert sorted(tree["f"] or b"" for tree in found) == [OLD[:512], OLD]


def test_entries_are_lost_each_by_itself_and_in_any_order() -> None:
    found = trees(event("mkdir", "a"), event("mkdir", "b"), event("mkdir", "c"))
    assert sorted("".join(sorted(tree)) for tree in found) == ["", "a", "ab", "abc", "ac", "b", "bc", "c"]


def test_a_rename_builds_on_what_made_its_source() -> None:
    found = trees(event("mkdir", "a"), event("rename", "a", "b"))
    assert sorted(map(str, found)) == sorted(map(str, [{}, {"a": None}, {"b": None}]))


def test_a_rename_is_one_change() -> None:
    found = trees(event("rename", "a", "b"), before={"a": None, "a/f": NEW})
    assert sorted(map(str, found)) == sorted(map(str, [{"a": None, "a/f": NEW}, {"b": None, "b/f": NEW}]))


def test_an_exchange_is_one_change() -> None:
    before: dict[str, bytes | None] = {"a": None, "a/f": OLD, "b": None, "b/f": NEW}
    found = trees(event("exchange", "a", "b"), before=before)
    after = {"a": None, "a/f": NEW, "b": None, "b/f": OLD}
    assert len(found) == 2
    assert before in found
    assert after in found


def test_what_was_synced_in_a_directory_moves_with_it() -> None:
    found = trees(
        event("mkdir", "a"),
        event("sync_dir", ""),
        *written("a/f", NEW),
        event("sync", "a/f"),
        event("sync_dir", "a"),
        event("rename", "a", "b"),
    )
    assert len(found) == 2
    assert {"a": None, "a/f": NEW} in found
    assert {"b": None, "b/f": NEW} in found


def test_names_in_a_directory_that_was_not_synced_may_be_lost_after_its_rename_was() -> None:
    found = trees(
        event("mkdir", "a"),
        *written("a/f", NEW),
        event("sync", "a/f"),
        event("rename", "a", "b"),
        event("sync_dir", ""),
    )
    assert len(found) == 2
    assert {"b": None} in found
    assert {"b": None, "b/f": NEW} in found


def test_a_removed_file_may_come_back() -> None:
    found = trees(event("unlink", "f"), event("unlink", "g"), before={"f": OLD, "g": NEW})
    assert len(found) == 4
    assert {"f": OLD, "g": NEW} in found


def test_files_may_be_gone_from_a_directory_whose_rename_was_lost() -> None:
    """The order that a careless removal relies on: first out of the way, then empty."""
    found = trees(event("rename", "a", "b"), event("unlink", "b/f"), before={"a": None, "a/f": OLD})
    assert {"a": None} in found


def test_a_sync_covers_the_file_that_was_opened_whatever_its_name_is_now() -> None:
    found = trees(
        event("mkdir", "a"),
        *written("a/f", NEW),
        event("sync_dir", "a"),
        event("rename", "a", "b"),
        event("sync", "a/f"),
    )
    assert all(content in (None, NEW) for tree in found for content in tree.values())


def test_render_fills_holes_only_where_nothing_was_reserved() -> None:
    disk = Disk(ROOT)
    for item in [
        event("open", "f"),
        event("fallocate", "f", nbytes=600),
        event("write", "f", offset=700, data=b"x"),
    ]:
        disk.replay(item)
    file = disk._file(f"{ROOT}/f")
    kept = [atom for atom in file.pending if atom != file.pending[-1]]
    assert render(b"", kept, GARBAGE) == bytes(600) + GARBAGE * 101


def test_with_nothing_lost_the_model_agrees_with_the_kernel(tmp_path: Path) -> None:
    with faults.traced() as events:
        fs.mkdir(str(tmp_path / "a"))
        fs.write_file(tmp_path / "a" / "f", OLD)
        fs.write_file(tmp_path / "a" / "f", NEW[:600], recycle=True)
        fs.write_file(tmp_path / "a" / "g", NEW)
        fs.mkdir(str(tmp_path / "b"))
        fs.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
        fs.unlink(str(tmp_path / "b" / "g"))
        fs.rename(str(tmp_path / "a"), str(tmp_path / "c"))
        fs.rmdir(str(tmp_path / "c"))
    disk = Disk(tmp_path)
    for item in events:
        disk.replay(item)
    assert disk.live_image() == image_of(tmp_path) == Image({"b": None, "b/f": NEW[:600]})
