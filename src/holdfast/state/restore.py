"""Filling a state that already exists: what is read straight into its memory, what is put back afterwards.

Owns the comparison of a checkpoint with its target (`Mismatch`) and the plan of the restore, for containers,
arrays, values and objects with ``load_state_dict``. Modules and optimizers belong to `restore_torch`. Reading
is the store's: it fills `destinations` and reads `fresh`, then hands the fresh arrays to `finish`.

Target and tree are walked side by side, so a place is matched with a place and names never need to be parsed.
Each place becomes a *plan*: a function that is given the arrays once they are read and returns what belongs
there. Plans run in the order of the tree, but for objects that ask to be restored last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.engine.buffers import Destination
from holdfast.errors import StateMismatch
from holdfast.state import torch_objects
from holdfast.state.arrays import Framework
from holdfast.state.leaves import Sharding
from holdfast.state.node import (
    MAX_DEPTH,
    NAMELESS,
    Node,
    corrupt,
    holds_leaves,
    items_of,
    leaf_names,
    leaf_of,
    pairs_of,
    shorten,
)
from holdfast.state.prune import prune
from holdfast.state.rebuild import decode, decode_key
from holdfast.state.targets import (
    MAPPINGS,
    SEQUENCES,
    array_destination,
    array_type,
    assign,
    copy_into,
    describe,
    has_span,
    holds_arrays,
    is_array,
    kind_of,
    load_state,
    memory_key,
    replaceable,
    span,
)
from holdfast.state.tree import component, names_in
from holdfast.state.value_encoder import type_name, unsupported


class LeafMeta(msgspec.Struct, frozen=True):
    """What a checkpoint says about one leaf."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    framework: Framework

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where checkpoint and target do not fit; true when there is such a place."""

    missing: tuple[str, ...]
    """The target has it, the checkpoint does not."""
    extra: tuple[str, ...]
    """The checkpoint has it, the target does not."""
    wrong: tuple[str, ...]
    """Both have it, but not alike: ``name: checkpoint F32[3,4], target F32[4,4]``."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.wrong)

    def __str__(self) -> str:
        parts = [
            f"{title} ({len(names)}):\n    " + "\n    ".join(_abridged(names))
            for title, names in (
                ("missing from the checkpoint", self.missing),
                ("not in the target", self.extra),
                ("different", self.wrong),
            )
            if names
        ]
        return "\n  ".join(["checkpoint and target do not fit", *parts])

    def error(self, where: str = "") -> StateMismatch:
        return StateMismatch(
            f"{where}{': ' if where else ''}{self}\n"
            "  Nothing has been changed. Fix the target, or pass strict=False to restore what fits.",
            missing=self.missing,
            extra=self.extra,
            wrong=self.wrong,
        )


def _abridged(names: tuple[str, ...], limit: int = 20) -> list[str]:
    shown = [shorten(name, 200) for name in names[:limit]]
    return shown if len(names) <= limit else [*shown, f"... and {len(names) - limit} more"]


Lookup = Callable[[str], Any]
"""Gives the array of a leaf or alias name, once it has been read."""

Plan = Callable[[Lookup], Any]
"""Puts one place of the target in order and returns what belongs there."""


class Landing:
    """One array of the target that receives a leaf: directly, or by a copy of an array read elsewhere."""

    __slots__ = ("direct", "leaf", "target")

    def __init__(self, target: Any, leaf: str, *, direct: bool) -> None:
        self.target = target
        self.leaf = leaf
        self.direct = direct

    def __call__(self, lookup: Lookup) -> Any:
        if not self.direct:
            copy_into(self.target, lookup(self.leaf))
        return self.target


class Restore:
    """The plan for putting a checkpoint back into `into`. Nothing is changed before the store reads.

    Read every leaf of `destinations` to where it says, and every leaf of `fresh` into a new array; then call
    `finish` with the new arrays. Leaves that are in neither do not fit (see `mismatch`) and need no reading.
    Of a leaf that is in `parts`, only a part goes to its destination: how, and the shape of what is here.
    With `only`, every place that holds none of these leaves stays as it is.
    """

    def __init__(
        self,
        into: object,
        tree: Node,
        leaves: Mapping[str, LeafMeta],
        aliases: Mapping[str, str],
        only: Collection[str] | None = None,
    ) -> None:
        self._only = only
        self._leaves = leaves
        self._aliases = aliases
        self._missing: list[str] = []
        self._extra: list[str] = []
        self._wrong: list[str] = []
        self._direct: dict[str, Landing] = {}
        self._by_memory: dict[tuple[Any, ...], str] = {}
        self._fresh: dict[str, None] = {}
        self._last: list[Callable[[], None]] = []
        self._state = into
        self._parameters: torch_objects.ParameterNames | None = None
        self.destinations: dict[str, Destination] = {}
        self.parts: dict[str, tuple[Sharding, tuple[int, ...]]] = {}
        self._plan = self.plan(into, tree, "", 0)
        self._settle_overlaps()
        self.fresh: tuple[str, ...] = tuple(name for name in self._fresh if name not in self.destinations)
        self.mismatch = Mismatch(tuple(self._missing), tuple(self._extra), tuple(self._wrong))

    def finish(self, arrays: Mapping[str, object]) -> object:
        """Put everything that is not an array in place back, and return the restored state.

        Dicts, lists, modules and optimizers of the target are the same objects as before; tuples are rebuilt.
        """

        def lookup(name: str) -> object:
            name = self._aliases.get(name, name)
            landing = self._direct.get(name)
            return landing.target if landing is not None and landing.direct else arrays[name]

        self._tell_autograd()
        restored = self._plan(lookup)
        for load in self._last:
            load()
        return restored

    # --- reports, for this module and restore_torch

    def missing(self, place: str, target: object) -> Plan:
        if self._only is None:
            self._missing.extend(names_in(target, place, self._state))
        return lambda lookup: target

    def extra(self, place: str, node: Node) -> None:
        if self._only is None:
            self._extra.extend(list(leaf_names(node)) or [place or NAMELESS])
        else:
            self._extra.extend(name for name in leaf_names(node) if name in self._only)

    def wrong(self, place: str, found: str, target: object, wanted: str) -> Plan:
        self._wrong.append(f"{place or NAMELESS}: checkpoint {found}, target {wanted}")
        return lambda lookup: target

    def leaves_out(self, node: Node) -> bool:
        """Whether nothing of this node is to be restored."""
        return self._only is not None and not any(name in self._only for name in leaf_names(node))

    def takes_all(self, node: Node) -> bool:
        return self._only is None or all(name in self._only for name in leaf_names(node))

    def parameter_names(self) -> torch_objects.ParameterNames:
        if self._parameters is None:
            self._parameters = torch_objects.parameter_names(self._state)
        return self._parameters

    def meta(self, name: str) -> LeafMeta:
        """What the checkpoint says about a leaf or alias."""
        found = self._leaves.get(self._aliases.get(name, name))
        if found is None:
            corrupt(f"it refers to leaf {shorten(name)!r}, which the checkpoint does not hold")
        return found

    # --- plans

    def plan(self, target: Any, node: Node, place: str, depth: int) -> Plan:
        """The plan for one place. Reports what does not fit."""
        if depth > MAX_DEPTH:
            raise unsupported(
                place[:200], f"nested deeper than {MAX_DEPTH} levels, or a container holds itself"
            )
        if self.leaves_out(node):
            return lambda lookup: target
        if is_array(target):
            return self._plan_array(target, node, place)
        if type(target) in MAPPINGS or type(target) in SEQUENCES:
            return self._plan_container(target, node, place, depth)
        if torch_objects.is_module(target):
            from holdfast.state import restore_torch

            inner = restore_torch.plan_module(self, torch_objects.plain_module(target), node, place)
            return lambda lookup: (inner(lookup), target)[1]
        if torch_objects.is_stateful(target) and not self.takes_all(node):
            return self.wrong(place, "has only some of its leaves selected", target, "takes all or none")
        if torch_objects.is_optimizer(target):
            from holdfast.state import restore_torch

            return restore_torch.plan_optimizer(self, target, node, place)
        if torch_objects.is_stateful(target):
            return self.plan_stateful(target, node, place)
        return self.plan_new(node, target)

    def plan_new(self, node: Node, target: object = None) -> Plan:
        """Build what the node says, reusing containers of `target`; its leaves are read into new arrays."""
        if self._only is not None and not self.takes_all(node):
            node = prune(node, self._only)
        for name in leaf_names(node):
            self._want(name)
        return lambda lookup: assign(target, decode(node, lookup))

    def plan_stateful(self, target: Any, node: Node, place: str) -> Plan:
        """Hand an object its state; one that says ``restore_last = True`` gets it after all others.

        Random number generators say so: others draw from them while they load.
        """
        build = self.plan_new(node)
        last = getattr(target, "restore_last", False) is True

        def load(lookup: Lookup) -> Any:
            state = build(lookup)
            if last:
                self._last.append(lambda: load_state(target, state, place))
            else:
                load_state(target, state, place)
            return target

        return load

    def _plan_array(self, target: Any, node: Node, place: str) -> Plan:
        name = leaf_of(node)
        if name is None:
            return self.wrong(place, f"holds {kind_of(node)}", target, f"a {type_name(target)}")
        return self.plan_leaf(target, name, place)

    def plan_leaf(self, target: Any, name: str, place: str) -> Plan:
        """Read a leaf into an array of the target, in place where its memory allows."""
        meta = self.meta(name)
        dtype, shape = array_type(target, place)
        if (meta.dtype, tuple(meta.shape)) != (dtype, shape):
            return self.wrong(name, str(meta), target, describe(dtype, shape))
        leaf = self._aliases.get(name, name)
        where = array_destination(target)
        if where is None:
            self._want(leaf)
            if replaceable(target):
                return lambda lookup: lookup(leaf)
            return Landing(target, leaf, direct=False)
        memory = memory_key(where)
        if memory is not None:
            tied = self._by_memory.setdefault(memory, leaf)
            if tied != leaf:
                return self.wrong(name, f"stored apart from {tied}", target, "tied to it")
        first = self._direct.get(leaf)
        if first is not None:
            # Tied in the checkpoint, apart in the target: read once, copied to the others.
            return Landing(target, leaf, direct=memory == memory_key(array_destination(first.target)))
        landing = Landing(target, leaf, direct=True)
        self._direct[leaf] = landing
        self.destinations[leaf] = where
        return landing

    def _plan_container(self, target: Any, node: Node, place: str, depth: int) -> Plan:
        # Plain values, or a place still empty: take over what was saved. But a target that names some keys
        # and finds arrays under others in the checkpoint is compared key by key.
        keyed = bool(target) and type(target) in MAPPINGS and pairs_of(node) is not None
        if not holds_arrays(target, depth) and not (keyed and holds_leaves(node)):
            return self.plan_new(node, target)
        if type(target) in MAPPINGS:
            pairs = pairs_of(node)
            if pairs is not None:
                return self._plan_mapping(target, pairs, place, depth)
        else:
            items = items_of(node)
            if items is not None:
                return self._plan_sequence(target, items, place, depth)
        return self.wrong(place, f"holds {kind_of(node)}", target, f"a {type(target).__name__} with arrays")

    def _plan_mapping(self, target: Any, pairs: Iterator[tuple[Node, Node]], place: str, depth: int) -> Plan:
        prefix = f"{place}." if place else ""
        plans: dict[Any, Plan] = {}
        for key_node, item in pairs:
            key = key_node if type(key_node) is str else decode_key(key_node)
            at = prefix + component(key)
            if key not in target:
                self.extra(at, item)
            else:
                plans[key] = self.plan(target[key], item, at, depth + 1)
        for key, item in target.items():
            if key not in plans:
                self.missing(prefix + component(key), item)

        def fill(lookup: Lookup) -> Any:
            for key, plan in plans.items():
                target[key] = plan(lookup)
            return target

        return fill

    def _plan_sequence(self, target: Any, items: list[Node], place: str, depth: int) -> Plan:
        prefix = f"{place}." if place else ""
        plans = [
            self.plan(own, item, f"{prefix}{index}", depth + 1)
            for index, (own, item) in enumerate(zip(target, items, strict=False))
        ]
        for index in range(len(plans), len(items)):
            self.extra(f"{prefix}{index}", items[index])
        for index in range(len(plans), len(target)):
            plans.append(self.missing(f"{prefix}{index}", target[index]))

        def fill(lookup: Lookup) -> Any:
            found = [plan(lookup) for plan in plans]
            if type(target) is tuple:
                return tuple(found)
            for index, item in enumerate(found):
                target[index] = item
            return target

        return fill

    def _want(self, name: str) -> None:
        self._fresh[self.meta(name).name] = None

    # --- memory

    def _settle_overlaps(self) -> None:
        """Two leaves must not be read into the same bytes at once: the later one is read apart and copied.

        Views of one buffer in the target (a matrix and its first row) are how this comes about.
        """
        spans = [(*span(where), name) for name, where in self.destinations.items() if has_span(where)]
        reach = -1
        for start, end, name in sorted(spans, key=lambda found: (found[0], -found[1])):
            if start < reach:
                self._direct[name].direct = False
                del self.destinations[name]
                self._fresh[name] = None
            else:
                reach = end

    def _tell_autograd(self) -> None:
        """The engine writes behind torch's back; a graph that saved these tensors must find out."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        for landing in self._direct.values():
            if landing.direct and isinstance(landing.target, torch.Tensor):
                torch.autograd.graph.increment_version(landing.target)
