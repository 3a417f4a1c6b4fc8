"""The full check of a checkpoint: every byte of every file, and that they agree with each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.engine import Unkept
from holdfast.errors import CorruptCheckpoint, ReadFailed
from holdfast.format.dtypes import carrier
from holdfast.format.records import ShardFile
from holdfast.format.shard import HeaderEntry, entry_name, is_pad, parse_header
from holdfast.store.checkpoint import Checkpoint, resolve
from holdfast.store.commit import MANIFEST
from holdfast.store.failures import reading
from holdfast.store.shards import Problem, Wanted


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found. `strangers` are files that do not belong there: harmless, but not ours."""

    path: str
    step: int | None
    leaves: int
    nbytes: int
    problems: tuple[Problem, ...]
    strangers: tuple[str, ...] = ()

    @property
    def intact(self) -> bool:
        return not self.problems


def verify(path: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> Report:
    """Check every byte. Damage is reported, not raised; a path with nothing at it is still an error."""
    where = resolve(path)
    try:
        checkpoint = Checkpoint(where)
    except (CorruptCheckpoint, ReadFailed) as error:
        file = getattr(error, "path", None) or os.path.join(where, MANIFEST)
        return Report(where, None, 0, 0, (Problem(file, getattr(error, "reason", str(error))),))
    with checkpoint:
        part = checkpoint.root.part
        wanted = [Wanted(leaf, Unkept(sum(f.nbytes for f in leaf.fragments))) for leaf in part.leaves]
        try:
            problems = checkpoint.shards.problems(wanted, verify=True, whole=True, progress=progress)
        except ReadFailed as error:
            problems = [Problem(os.fsdecode(error.filename), str(error))]
        except CorruptCheckpoint as error:
            problems = [Problem(error.path or where, error.reason, error.leaf)]
        damaged = {problem.file for problem in problems if problem.leaf is None}
        for index, file in enumerate(part.files):
            shown = os.path.join(where, file.name)
            if shown not in damaged and os.path.exists(shown):
                problems += _header_problems(checkpoint, index, file, shown)
        ours = {file.name for file in part.files} | {ref.file for ref in checkpoint.root.parts}
        ours.add(os.path.basename(checkpoint.manifest_path))
        strangers = tuple(sorted(set(os.listdir(where)) - ours))
        return Report(
            where, checkpoint.step, len(checkpoint), checkpoint.stored_nbytes, tuple(problems), strangers
        )


def _header_problems(checkpoint: Checkpoint, index: int, file: ShardFile, shown: str) -> list[Problem]:
    """What safetensors readers see must be what the manifest says."""
    try:
        with reading(shown), open(shown, "rb") as opened:
            header = parse_header(opened.read(file.header_nbytes), file.nbytes, shown)
    except (CorruptCheckpoint, ReadFailed) as error:
        return [Problem(shown, getattr(error, "reason", str(error)))]
    expected = {
        HeaderEntry(
            entry_name(leaf.name),
            carrier(leaf.dtype).name,
            (*fragment.shape, *carrier(leaf.dtype).tail),
            fragment.offset - file.header_nbytes,
            fragment.offset - file.header_nbytes + fragment.nbytes,
        )
        for leaf in checkpoint.root.part.leaves
        for fragment in leaf.fragments
        if fragment.file == index
    }
    present = {entry for entry in header.entries if not is_pad(entry.name)}
    return [
        Problem(shown, "the shard's header and the manifest describe this leaf differently", entry.name)
        for entry in sorted(expected ^ present, key=lambda entry: entry.name)
    ]
