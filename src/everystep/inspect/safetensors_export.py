"""Writing leaves of a checkpoint as one safetensors file: streamed, verified, all or nothing.

1. Write a temporary file beside the target, a window of leaves at a time, each checked against its checksums.
2. Sync it. 3. Rename it to the target. 4. Sync the directory.

A failure before the rename leaves the target as it was.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everystep.engine import fs
from everystep.errors import CheckpointExists, StateMismatch
from everystep.paths import local_path
from everystep.store import Options, is_checkpoint
from everystep.store.names import PARTIAL, RETIRED
from everystep.store.options import reading_tuning
from everystep.store.read.checkpoint import Checkpoint, open_newest
from everystep.store.save_errors import saving
from everystep.store.stream.progress import Progress, no_progress
from everystep.store.stream.safetensors_writer import FileEntry, SafetensorsFile

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` wrote.

    Attributes:
        path: The file.
        step: The step of the checkpoint; None if it does not state one.
        leaves: How many leaves are in the file.
        nbytes: The size of the file.
        tied: Names that were left out, and the name in the file with the same bytes.
    """

    path: str
    step: int | None
    leaves: int
    nbytes: int
    tied: dict[str, str]


def export(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    select: Sequence[str] | None = None,
    strip: str = "",
    force: bool = False,
    options: Options | None = None,
    progress: Progress = no_progress,
) -> Exported:
    """Write leaves of a checkpoint as one safetensors file, durable on return.

    Tied leaves are written once, under their first name; the file's metadata lists the others, and the step.
    Every byte is verified on the way.

    Args:
        path: A checkpoint, or a run, whose newest is exported.
        output: The file to write. Its name must end in ``.safetensors``.
        select: Globs: write only the leaves that match any of them.
        strip: A prefix that all names lose, such as ``model.``.
        force: Replace `output` if it exists; otherwise `everystep.CheckpointExists` is raised.
        options: How to read, as for `everystep.load`.
        progress: Called with the bytes written so far, and the bytes in all.
    """
    target = local_path(output)
    if not target.endswith(SUFFIX):
        raise ValueError(wrong_suffix(target))
    with open_newest(path, reading_tuning(options)) as checkpoint:
        chosen = checkpoint.select(list(select)) if select else list(checkpoint._parts.leaf_infos)
        entries, tied = chosen_entries(checkpoint, chosen, strip)
        file = SafetensorsFile(checkpoint, entries, tied, strip)
        _write(file, checkpoint, target, force, progress)
        return Exported(target, checkpoint._stated_step, len(entries), file.nbytes, tied)


def wrong_suffix(output: str | os.PathLike[str]) -> str:
    """The message for an output with the wrong suffix."""
    return (
        f"export writes {SUFFIX} files, not {os.path.basename(output)!r}. `everystep convert` writes others: "
        ".pt, .pth, .bin and .ckpt, and directories of Everystep, Hugging Face, DCP and more"
    )


def chosen_entries(
    checkpoint: Checkpoint, chosen: Iterable[str], strip: str = ""
) -> tuple[list[FileEntry], dict[str, str]]:
    """The entries of a file: every stored leaf once, under the first of its chosen names, without a prefix.

    Also returns the names that are left out because another has the same bytes.
    """
    names: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name in chosen:
        if not name.startswith(strip) or name == strip:
            raise StateMismatch(
                f"{name!r} does not begin with {strip!r}, which is to be stripped: select the leaves that do",
                extra=[name],
            )
        shown = name[len(strip) :]
        stored = checkpoint._parts.leaf_infos[name].alias_of or name
        if stored in names:
            tied[shown] = names[stored]
        else:
            names[stored] = shown
    infos = checkpoint._parts.leaf_infos
    return [FileEntry(stored, name, infos[stored].dtype) for stored, name in names.items()], tied


def _write(file: SafetensorsFile, checkpoint: Checkpoint, path: str, force: bool, progress: Progress) -> None:
    with saving(path):
        _refuse(path, force)
        _refuse_own(path, checkpoint)
        directory = os.path.dirname(path)
        temporary = os.path.join(directory, f".everystep-export-{uuid.uuid4().hex[:12]}.partial")
        try:
            file.write(temporary, lambda done: progress(done, file.nbytes))
            _refuse(path, force)
            fs.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                fs.unlink(temporary)
            raise
        fs.sync_dir(directory)


def _refuse(path: str, force: bool) -> None:
    """Raises unless a file may be written there. Only files outside checkpoints are replaced."""
    directory = os.path.realpath(os.path.dirname(path))
    if is_checkpoint(directory) or directory.endswith((PARTIAL, RETIRED)):
        raise CheckpointExists(
            f"{path} is inside a checkpoint, and checkpoints are immutable: choose another place"
        )
    if not os.path.lexists(path):
        return
    if os.path.isdir(path):
        raise CheckpointExists(f"{path} is a directory: name a file to write")
    # A dangling link may be replaced, too: the name is replaced, not the target of the link.
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointExists(f"{path} is not a regular file, so it is not replaced: choose another name")
    if not force:
        raise CheckpointExists(f"{path} exists: choose another name, or force (--force) to replace it")


def _refuse_own(path: str, checkpoint: Checkpoint) -> None:
    """Shards may be on volumes, in directories that do not look like checkpoints."""
    if not os.path.exists(path) or os.path.islink(path):
        return
    for part in checkpoint._parts:
        reader = checkpoint._reader.shards(part.rank)
        for file in part.files:
            if _same_file(path, reader.path(file)):
                raise CheckpointExists(f"{path} is a file of the checkpoint to export: name another")


def _same_file(one: str, other: str) -> bool:
    """Whether both exist and are the same file. Retention may remove a checkpoint while it is exported."""
    try:
        return os.path.samefile(one, other)
    except (FileNotFoundError, NotADirectoryError):
        return False
