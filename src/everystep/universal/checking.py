"""What can be verified of a checkpoint of another system: it has no checksums of its own.

That it can be opened (its files are there and have the sizes that its metadata say), that every byte of its
leaves can be read, that copies which should be equal are, and the CRCs of zip archives (`torch.save`, npz).
`everystep.store.read.foreign` calls this.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from everystep.engine import READING, Tuning
from everystep.errors import CorruptCheckpoint, OutOfResources, ReadFailed
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.read.shard_reader import VerifyProblem
from everystep.store.read.verify import VerifyReport
from everystep.store.stream.leaf_stream import LeafStream, StreamedLeaf
from everystep.universal.foreign_checkpoint import ForeignCheckpoint
from everystep.universal.inflation import refuse_bomb
from everystep.universal.readback import compare_copies
from everystep.universal.recognition import describe
from everystep.universal.torch_file.zip_reader import (
    LOCAL_MAGIC,
    OpenFile,
    Place,
    ZipRecords,
    noting_archives,
)

_BLOCK_NBYTES = 8 << 20


def check(path: str, progress: Callable[[int], None] | None = None, tuning: Tuning = READING) -> VerifyReport:
    """Every byte of a foreign checkpoint, read and checked as far as its format allows.

    Damage is reported, not raised. A checkpoint that Everystep cannot read is an error (`UnsupportedSource`).
    """
    problems: list[VerifyProblem] = []
    step, leaves, nbytes, files, kind = None, 0, 0, 0, "unknown"
    with noting_archives() as archives:
        try:
            with ForeignCheckpoint(describe(path), tuning) as checkpoint:
                step, leaves, kind = checkpoint._stated_step, len(checkpoint), checkpoint._parts.root.format
                sizes = {file.name: file.nbytes for file in checkpoint._parts.root.part.files}
                files, nbytes = len(sizes), sum(sizes.values())
                if os.path.isfile(path) and _is_archive(path):
                    archives[path, 0, os.path.getsize(path)] = None
                _read_all(checkpoint, progress)
                compare_copies(checkpoint)
        except OutOfResources:
            raise
        except (CorruptCheckpoint, ReadFailed) as error:
            problems.append(_problem(error, path))
    crcs = [_check_records(place, problems, tuning.max_inflation) for place in archives]
    return VerifyReport(
        path,
        step,
        leaves,
        nbytes,
        tuple(dict.fromkeys(problems)),
        files=files,
        instead=f"{kind}: no checksums, but {'the CRCs of its archives, ' if any(crcs) else ''}"
        "sizes and structure agree",
    )


def _read_all(checkpoint: Checkpoint, progress: Callable[[int], None] | None) -> None:
    """Every byte of every leaf: what cannot be read, or inflated, is an error."""
    names = [name for name, info in checkpoint._parts.leaf_infos.items() if info.alias_of is None]
    block = memoryview(bytearray(_BLOCK_NBYTES))
    done = 0
    with LeafStream(
        checkpoint, [StreamedLeaf(name, checkpoint._parts.leaf_infos[name].dtype) for name in names]
    ) as stream:
        for number, size in enumerate(stream.sizes):
            for start in range(0, size, _BLOCK_NBYTES):
                part = block[: min(_BLOCK_NBYTES, size - start)]
                stream.fill(number, part, start)
                done += len(part)
                if progress is not None:
                    progress(done)


def _is_archive(path: str) -> bool:
    with OpenFile(path) as file:
        return file.nbytes >= len(LOCAL_MAGIC) and file.read(0, len(LOCAL_MAGIC)) == LOCAL_MAGIC


def _check_records(place: Place, problems: list[VerifyProblem], max_inflation: float) -> bool:
    """Compares the records of an archive with their CRCs. Whether there are any: torch may write none."""
    path, start, nbytes = place
    try:
        with OpenFile(path, start, nbytes) as file:
            records = ZipRecords(file)
            refuse_bomb(path, records.nbytes, nbytes, max_inflation)
            found = [records.wrong(name) for name in records.names]
    except CorruptCheckpoint as error:
        problems.append(_problem(error, path))
        return False
    problems += [VerifyProblem(path, wrong) for wrong in found if wrong is not None]
    return records.have_crcs


def _problem(error: CorruptCheckpoint | ReadFailed, path: str) -> VerifyProblem:
    if isinstance(error, CorruptCheckpoint):
        return VerifyProblem(error.path or path, error.reason, error.leaf)
    return VerifyProblem(os.fsdecode(error.filename or path), str(error))
