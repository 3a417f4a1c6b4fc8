"""Everystep checkpoints: one commit, with checksums, of leaves that stream out of the source."""

from __future__ import annotations

from collections.abc import Sequence

from everystep.engine import Produced
from everystep.plan import arrange
from everystep.state import FlatState, LeafSource
from everystep.store import Commit, SaveObserver, Transaction, whole
from everystep.store.api import check_target, make_parent
from everystep.store.names import PARTIAL
from everystep.store.read.checkpoint import open_uncommitted
from everystep.store.stream.leaf_stream import LeafStream, StreamedLeaf
from everystep.universal.items import Item, Job, OutputFile, advance, framework_of
from everystep.universal.readback import compare_written


def plan(job: Job) -> list[OutputFile]:
    check_target(job.path)
    return [OutputFile("", job.nbytes)]


def write(job: Job) -> None:
    check_target(job.path)
    make_parent(job.path)
    # The engine goes through a file from its start, so the source is read in the order of the leaves there.
    by_name = {item.name: item for item in job.items}
    order = [
        by_name[leaf.name] for leaf in arrange([[_leaf(job, item, _nothing) for item in job.items]]).leaves
    ]
    streamed = [StreamedLeaf(item.stored, item.dtype) for item in order]
    with LeafStream(job.checkpoint, streamed) as stream:
        leaves = {item.name: _leaf(job, item, stream.source(number)) for number, item in enumerate(order)}
        flat = _flat(job, [leaves[item.name] for item in job.items])
        source = job.checkpoint
        transaction = Transaction(job.path, overwrite=job.overwrite)
        commit = Commit(transaction, source.step, source.metrics, job.tuning)
        commit.run(whole(flat), observer=_Progress(job, stream))


def check(job: Job, path: str) -> None:
    with open_uncommitted(path, job.checkpoint._reader.tuning) as written:
        compare_written(job, written)


def _nothing(window: memoryview, offset: int) -> None:
    raise AssertionError("this stands for a leaf whose place is not known yet")


def _leaf(job: Job, item: Item, source: object) -> LeafSource:
    found = source if isinstance(source, Produced) else Produced(item.nbytes, _nothing)
    return LeafSource(item.name, item.dtype, item.shape, framework_of(job, item), found)


def _flat(job: Job, leaves: Sequence[LeafSource]) -> FlatState:
    local = [leaf for leaf in leaves if leaf.name.startswith("@")]
    if not local:
        return FlatState(job.tree, tuple(leaves), tuple(job.tied.items()), dict(job.local))
    return FlatState(
        job.tree,
        tuple(leaf for leaf in leaves if not leaf.name.startswith("@")),
        tuple((name, of) for name, of in job.tied.items() if not name.startswith("@")),
        dict(job.local),
        tuple(local),
        tuple((name, of) for name, of in job.tied.items() if name.startswith("@")),
    )


class _Progress(SaveObserver):
    """Reports how much has been written, and then verifies it if the job says so."""

    def __init__(self, job: Job, stream: LeafStream) -> None:
        self._job = job
        self._stream = stream
        self._advance = advance(job, 0)

    def advanced(self, nbytes: int) -> None:
        self._advance(nbytes)

    def committing(self) -> None:
        self._stream.close()  # its memory is needed to verify
        if self._job.verify:
            check(self._job, self._job.path + PARTIAL)
