"""What one checkpoint holds: facts, values, and its leaves in the order of the state. Reads no arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from everystep.format.records import ShardFile
from everystep.inspect.subtrees import Subtotal, subtotals
from everystep.state import Node, flatten, leaf_names
from everystep.state.node import COUNTER, DICT, UNORDERED, without_order
from everystep.store import LeafInfo, Options
from everystep.store.options import reading_tuning
from everystep.store.read.checkpoint import Checkpoint, open_newest

_UNORDERED = (*UNORDERED, DICT, COUNTER)
"""Nodes whose pairs or members are equal in any order. Dicts with other keys than text are among them."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a checkpoint holds.

    Attributes:
        path: The checkpoint.
        format: The version of its format, or the kind of another system's checkpoint.
        id: A random name of the save.
        step: Its step; None if a checkpoint of another system does not state one.
        created: Unix time of the save.
        world: How many ranks wrote it.
        metrics: The metrics that were given to the save.
        nbytes: The size of the arrays that one process loads.
        stored_nbytes: The size of the shards.
        files: Its shards.
        values: Everything that is not an array, by dotted name, as Python objects.
        leaves: The leaves that were asked for, in the order of the state.
        all_leaves: How many leaves it has.
        facts: What a checkpoint of another system says of itself.
    """

    path: str
    format: str
    id: str
    step: int | None
    created: float
    world: int
    metrics: Mapping[str, float]
    nbytes: int
    stored_nbytes: int
    files: tuple[ShardFile, ...]
    values: Mapping[str, object]
    leaves: Mapping[str, LeafInfo]
    all_leaves: int
    facts: Mapping[str, str]

    def subtotals(self, depth: int | None = None) -> tuple[Subtotal, ...]:
        """What the leaves add up to, subtree by subtree.

        Args:
            depth: How many parts of a name tell subtrees apart; by default as few as make at least two of
                them.
        """
        return subtotals(self.leaves, depth)


def describe(
    path: str | os.PathLike[str],
    *,
    leaves: str | None = None,
    as_training: bool | None = None,
    options: Options | None = None,
) -> Description:
    """What a checkpoint holds. Reads no arrays.

    Args:
        path: A checkpoint, or a run, whose newest is meant.
        leaves: A glob or a subtree: list only the leaves in it.
        as_training: How to show a file of another system; see `everystep.load`.
        options: How to read, as for `everystep.load`.
    """
    with open_newest(path, reading_tuning(options)) as checkpoint:
        checkpoint._arrange(as_training)
        matching = None if leaves is None else set(checkpoint.select(leaves))
        shown = checkpoint.leaves
        return Description(
            path=checkpoint.path,
            format=checkpoint._parts.root.format,
            id=checkpoint.id,
            step=checkpoint._stated_step,
            created=checkpoint.created,
            world=checkpoint.world,
            metrics=checkpoint.metrics,
            nbytes=checkpoint.nbytes,
            stored_nbytes=checkpoint.stored_nbytes,
            files=tuple(file for part in checkpoint._parts for file in part.files),
            values=checkpoint.values,
            leaves={
                name: shown[name] for name in leaf_order(checkpoint) if matching is None or name in matching
            },
            all_leaves=len(checkpoint),
            facts=dict(checkpoint._facts),
        )


def leaf_order(checkpoint: Checkpoint) -> list[str]:
    """Names of all leaves in the order of the state; in files they are in the order of their alignment."""
    named = dict.fromkeys(name for name in leaf_names(checkpoint._parts.tree) if name in checkpoint)
    return [*named, *(name for name in checkpoint if name not in named)]


def stored_values(values: Mapping[str, object]) -> dict[str, Node]:
    """Every value in its stored form: JSON that keeps type and bits."""
    return {name: flatten(value).tree for name, value in values.items()}


def exact_bytes(node: Node) -> bytes:
    """Equal for equal nodes only: in Python, 1, 1.0 and True are equal.

    The order of a plain dict's keys does not count: to Python such dicts are equal. The members of sets
    have no order, and every process stores them in its own.
    """
    return msgspec.json.encode(without_order(node, _UNORDERED), order="deterministic")
