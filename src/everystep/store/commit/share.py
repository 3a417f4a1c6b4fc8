"""What one process writes of a state, and what it reports of that to the coordinator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everystep.errors import UnsupportedState
from everystep.format.records import PartRef
from everystep.state import FlatState, LeafSource
from everystep.state.node import Node
from everystep.store.commit.round import ShareWritten


@dataclass(frozen=True, slots=True)
class Share:
    """The leaves, or fragments of leaves, that this process writes, and what the manifest says besides.

    Of a state that one process saves alone, that is all of it, and nothing needs to be compared.
    """

    tree: Node
    """The root's, on the coordinator. On another rank its own, if that has another structure."""
    leaves: tuple[LeafSource, ...]
    aliases: tuple[tuple[str, str], ...]
    local: Mapping[str, Node]
    count: int
    """Leaves of the whole state."""
    whole_nbytes: int = 0
    """Of the whole state: what all ranks write."""
    plan: str = ""
    """The fingerprint of the plan that says who writes what."""
    layout: bytes = b""
    """That plan, as it is stored."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Digests of its plain values, by place."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Digests of all of them, where trees of different structures are stored and this is one of them."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """Digests of samples of what others hold, too."""

    def written(self, ref: PartRef, files: Sequence[str], stored_nbytes: int) -> ShareWritten:
        """The report that this share is durable."""
        nbytes = sum([leaf.nbytes for leaf in self.leaves])
        tree = ref.rank > 0 and self.tree is not None
        return ShareWritten(
            ref, tuple(files), nbytes, stored_nbytes, self.plan, tree, self.values, self.facts, self.samples
        )


def whole(flat: FlatState) -> Share:
    """The share of a process that saves a state alone. It must hold all arrays completely."""
    leaves = flat.leaves + flat.local_leaves
    boxes: dict[str, list[LeafSource]] = {}
    for leaf in leaves:
        if leaf.fragment is not None:
            boxes.setdefault(leaf.name, []).append(leaf)
        elif leaf.sharding is not None and leaf.sharding.shape != leaf.shape:
            raise _incomplete(leaf, list(leaf.shape))
    for parts in boxes.values():
        held = sum(math.prod(leaf.shape) for leaf in parts)
        if held != math.prod(parts[0].whole_shape):
            raise _incomplete(parts[0], f"{held} elements")
    count = len({leaf.name for leaf in leaves}) if boxes else len(leaves)
    aliases = flat.aliases + flat.local_aliases
    return Share(flat.tree, leaves, aliases, flat.local, count)


def _incomplete(leaf: LeafSource, held: object) -> UnsupportedState:
    return UnsupportedState(
        f"{leaf.name}: this process holds only {held} of an array of shape {list(leaf.whole_shape)}; other "
        'ranks hold the rest. Save it on all of them together, without process_group="none"'
    )
