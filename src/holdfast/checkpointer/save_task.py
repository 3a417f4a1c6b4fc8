"""What one save has to do: which leaves this rank writes, and how they become a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpointer.retention import ids
from holdfast.engine.fs import HeldDirectory
from holdfast.state import LeafSource, flatten
from holdfast.store import CheckpointInfo, Conversation, RankGroup, SaveObserver, SingleCommit, Target
from holdfast.store.commit.volumes import Ledger
from holdfast.store.locks import path_to_read

Groups = Sequence[Sequence[LeafSource]]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be saved: these leaves, and how they become a checkpoint.

    `commit` is given the target, the leaves in their order, and who watches.
    """

    leaves: tuple[LeafSource, ...]
    nbytes: Callable[[], int]
    """The size of the whole checkpoint's arrays, those of other ranks included."""
    commit: Callable[[Target, Groups | None, SaveObserver], CheckpointInfo]


def take_apart(
    group: RankGroup,
    state: object,
    run: HeldDirectory | None,
    step: int,
    metrics: Mapping[str, float],
    talk: Conversation | None,
    *,
    replace: bool,
) -> Work:
    """The state as it is now, as far as this rank writes it. `run`: its directory, on the coordinator.

    `replace`: a checkpoint of that step that is there already makes way for it.
    """
    if not group.needed:
        flat = flatten(state)

        def alone(target: Target, groups: Groups | None, watch: SaveObserver) -> CheckpointInfo:
            commit = SingleCommit(target, step, metrics, group.settings.tuning, overwrite=replace)
            return commit.run(flat, groups, watch)

        leaves = flat.leaves + flat.local_leaves
        return Work(leaves, lambda: sum(leaf.nbytes for leaf in leaves), alone)
    ready = group.prepare(state, talk)
    ledger = Ledger(run) if run is not None and group.has_volumes else None
    live = None if run is None or ledger is None else ids(path_to_read(run))

    def together(target: Target, groups: Groups | None, watch: SaveObserver) -> CheckpointInfo:
        return group.commit(
            ready,
            target,
            step,
            metrics,
            groups=groups,
            observer=watch,
            overwrite=replace,
            ledger=ledger,
            live=live,
        )

    return Work(
        ready.share.fragments,
        lambda: ready.share.whole_nbytes,
        together,
    )
