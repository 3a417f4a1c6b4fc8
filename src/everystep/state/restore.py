"""Filling a state that already exists: what is read straight into its memory, what is put back afterwards.

Owns the comparison of a checkpoint with its target and the plan of the restore, for containers, arrays,
values and objects with ``load_state_dict``. Modules and optimizers belong to `restore_modules` and
`restore_optimizers`, memory to `destinations`. The store reads: it fills `Restore.destinations`, reads
`fresh` into new arrays, and passes these to `finish`.

Target and tree are walked side by side, so a place is matched with a place and names never need to be parsed.
Each place becomes a *plan*: a function that is given the arrays once they are read and returns what belongs
there. Plans run in the order of the tree, but for objects that ask to be restored last.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from everystep.engine.buffers import Destination
from everystep.errors import UnsupportedState
from everystep.format.geometry import Box
from everystep.state import jax_arrays, torch_objects
from everystep.state.destinations import FillPlan, Lookup, never_alike
from everystep.state.flatten import key_node
from everystep.state.leaf_table import component
from everystep.state.leaves import Sharding
from everystep.state.marks import RankMark
from everystep.state.mismatch import LeafMeta, Mismatch
from everystep.state.node import (
    DICT,
    MAX_DEPTH,
    NAMESPACE,
    Node,
    holds_arrays,
    holds_leaves,
    holds_per_rank,
    items_of,
    leaf_of,
    localized,
    pairs_of,
    per_rank_of,
    tag_of,
)
from everystep.state.refusals import type_name, unfillable
from everystep.state.restore_context import Renaming, RestoreContext
from everystep.state.restore_modules import plan_module
from everystep.state.restore_optimizers import plan_optimizer
from everystep.state.select import Selection
from everystep.state.targets import (
    MAPPINGS,
    SEQUENCES,
    Rebuilt,
    has_arrays,
    holds_strangers,
    is_array,
    is_value_target,
    kind_of,
)
from everystep.state.unflatten import decode_key


class Restore:
    """The plan for putting a checkpoint back into `into`. Nothing is changed before the store reads.

    Read every leaf of `destinations` to where it says, and every leaf of `fresh` into a new array; then call
    `finish` with the new arrays. Leaves that are in neither do not fit (see `mismatch`) and need no reading.
    Of a leaf that is in `parts`, only a part goes to its destination: how, and the shape of what is here.
    (Its name may be an alias, where leaves tied in the checkpoint lie differently here; and it may be in
    `fresh` as well, if another place takes it whole.) `boxes` of leaves are read besides, each to its place.

    `local` has the nodes of what was saved of one rank alone; places without them stay as they are, and are
    listed in `kept`. Such state that has no place here is no mismatch, and listed in `left_out`: on another
    number of ranks, a position in the data means nothing. With `shared`, the checkpoint is that of many ranks
    and may have more than this one: leaves that have no place here are listed in `elsewhere`. Of a sharded
    optimizer, those of other ranks always are. With `only`, every place that is not selected stays as it is.
    `alike` says whether two leaves have the same bytes: then they may be one array in the target.
    `rename` gives the names that parameters of the checkpoint have in the target: in the state dicts of
    modules and optimizers, and in dicts of nothing but arrays.
    """

    def __init__(
        self,
        into: object,
        tree: Node,
        leaves: Mapping[str, LeafMeta],
        aliases: Mapping[str, str],
        only: Collection[str] | Selection | None = None,
        *,
        local: Mapping[str, Node] | None = None,
        shared: bool = False,
        alike: Callable[[str, str], bool] = never_alike,
        rename: Renaming | None = None,
        strict: bool = True,
    ) -> None:
        own = local or {}
        if only is not None and not isinstance(only, Selection):
            only = Selection(frozenset(only))
        context = RestoreContext(
            into,
            leaves,
            aliases,
            only,
            own_places=own,
            shared=shared,
            alike=alike,
            rename=rename,
            strict=strict,
        )
        context.entries = tuple(key for key, _ in pairs_of(tree) or () if isinstance(key, str))
        self._context = context
        self._plan = _plan(context, into, localized(tree, local), "", 0)
        context.settle()
        memory_plan = context.memory_plan
        memory_plan.settle_overlaps()
        self.state = into
        self.destinations: dict[str, Destination] = memory_plan.destinations
        self.parts: dict[str, tuple[Sharding, tuple[int, ...]]] = memory_plan.parts
        self.boxes: tuple[tuple[str, Box, Destination], ...] = tuple(memory_plan.boxes)
        self.fresh: tuple[str, ...] = memory_plan.fresh()
        self.kept: tuple[str, ...] = tuple(context.kept)
        self.left_out: tuple[str, ...] = tuple(context.left_out)
        self.elsewhere: tuple[str, ...] = tuple(context.elsewhere)
        self.fills: bool = memory_plan.used
        """Whether any leaf of the checkpoint has a place in the target."""
        self.lacks: bool = context.lacks or (only is not None and bool(self.mismatch))
        """Whether a leaf that the target, or `only`, asks for cannot be restored."""

    @property
    def mismatch(self) -> Mismatch:
        """Where checkpoint and target do not fit. `finish` may find more, where modules decide."""
        return self._context.mismatch()

    def finish(self, arrays: Mapping[str, object]) -> object:
        """Put everything that is not an array in place back, and return the restored state.

        Dicts, lists, modules and optimizers of the target are the same objects as before; tuples are rebuilt.
        """
        memory_plan = self._context.memory_plan
        memory_plan.tell_autograd()
        lookup = memory_plan.lookup(arrays)
        memory_plan.join_overlaps(lookup)
        restored = self._plan(lookup)
        for load in self._context.load_last:
            load()
        return restored


def _plan(context: RestoreContext, target: Any, node: Node, place: str, depth: int) -> FillPlan:
    """The plan for one place. Reports what does not fit."""
    if depth > MAX_DEPTH:
        raise unfillable(place[:200], f"nested deeper than {MAX_DEPTH} levels, or a container holds itself")
    if context.leaves_out(node, place):
        return lambda lookup: target
    mark = per_rank_of(node)
    if mark is not None:
        context.kept[mark] = None
        return lambda lookup: target
    if isinstance(target, RankMark):
        return _plan_marked(context, target, node, place, depth)
    if isinstance(target, Rebuilt):
        return _plan_rebuilt(context, target, node, place, depth)
    if is_array(target):
        return _plan_array(context, target, node, place)
    if jax_arrays.is_array(target):
        return _plan_jax_array(context, target, node, place)
    if type(target) is Namespace and tag_of(node) == NAMESPACE:
        assert type(node) is dict
        fill = _plan_container(context, vars(target), {DICT: node[NAMESPACE]}, place, depth)
        return lambda lookup: (fill(lookup), target)[1]
    if type(target) in MAPPINGS or type(target) in SEQUENCES:
        return _plan_container(context, target, node, place, depth)
    if torch_objects.is_module(target):
        inner = plan_module(context, torch_objects.plain_module(target), node, place)
        return lambda lookup: (inner(lookup), target)[1]
    if torch_objects.is_stateful(target) and not context.takes_all(node, place):
        return context.wrong(place, "has only some of its leaves selected", target, "takes all or none")
    if torch_objects.is_optimizer(target):
        return context.after_all(lambda: plan_optimizer(context, target, node, place))
    if torch_objects.is_stateful(target):
        return context.plan_stateful(target, node, place)
    return _plan_other(context, target, node, place)


def _plan_other(context: RestoreContext, target: Any, node: Node, place: str) -> FillPlan:
    """Values are replaced by what was saved, and so is None, by which a target says nothing.

    A number may have become an array since. But nothing else knows how to take arrays, and who gives it
    as a target believes that they are in it afterwards.
    """
    may_change = target is None or (is_value_target(target) and leaf_of(node) is not None)
    if may_change or not holds_arrays(node):
        return context.plan_new(node, target, place=place)
    held = kind_of(node) if leaf_of(node) is not None else f"{kind_of(node)} with arrays"
    return context.wrong(place, f"holds {held}", target, f"of type {type_name(target)}, which cannot take it")


def _plan_marked(
    context: RestoreContext, target: RankMark[Any], node: Node, place: str, depth: int
) -> FillPlan:
    inner = _plan(context, target.value, node, place, depth + 1)

    def fill(lookup: Lookup) -> Any:
        target.value = inner(lookup)
        return target

    return fill


def _plan_rebuilt(
    context: RestoreContext, target: Rebuilt[Any], node: Node, place: str, depth: int
) -> FillPlan:
    inner = _plan(context, target.memory([key for key, _ in pairs_of(node) or ()]), node, place, depth + 1)

    def rebuild(lookup: Lookup) -> Any:
        target.rebuild(inner(lookup))
        return target

    return rebuild


def _plan_array(context: RestoreContext, target: Any, node: Node, place: str) -> FillPlan:
    name = leaf_of(node)
    if name is None:
        return context.wrong(place, f"holds {kind_of(node)}", target, f"a {type_name(target)}")
    return context.plan_leaf(target, name, place)


def _plan_jax_array(context: RestoreContext, target: Any, node: Node, place: str) -> FillPlan:
    """Arrays of JAX do not change: a new one takes the old one's place in the target, on the same devices."""
    boxes = jax_arrays.empty_alone(target, place)
    name = leaf_of(node)
    if name is None:
        return context.wrong(place, f"holds {kind_of(node)}", target, "a jax.Array")
    fill = context.plan_leaf(boxes, name, place)

    def replaced(lookup: Lookup) -> Any:
        filled = fill(lookup)
        if filled is boxes:  # it does not fit
            return target
        return jax_arrays.placed(target, filled, weak=target.weak_type)

    return replaced


def _plan_container(context: RestoreContext, target: Any, node: Node, place: str, depth: int) -> FillPlan:
    # Plain values, or a place still empty: take over what was saved. But a target that names some keys
    # and finds arrays under others in the checkpoint is compared key by key; and so is one of which some
    # places are to stay as they are.
    apart = holds_arrays(node) if context.only is None else holds_leaves(node)
    keyed = bool(target) and type(target) in MAPPINGS and pairs_of(node) is not None
    if not (
        has_arrays(target, depth)
        or (apart and (keyed or holds_strangers(target, depth)))
        or (target and holds_per_rank(node))
        or context.looks_inside(place)
    ):
        return context.plan_new(node, target, place=place)
    if type(target) in MAPPINGS:
        pairs = pairs_of(node)
        if pairs is not None:
            return _plan_mapping(context, target, pairs, place, depth)
    else:
        items = items_of(node)
        if items is not None:
            return _plan_sequence(context, target, items, place, depth)
    return context.wrong(place, f"holds {kind_of(node)}", target, f"a {type(target).__name__} with arrays")


def _plan_mapping(
    context: RestoreContext, target: Any, pairs: Iterator[tuple[Node, Node]], place: str, depth: int
) -> FillPlan:
    prefix = f"{place}." if place else ""
    plans: dict[Any, FillPlan] = {}
    strange: dict[str, list[Any]] = {}
    found: dict[Any, Node] = {}
    rename = bool(target) and all(is_array(item) or jax_arrays.is_array(item) for item in target.values())
    for node, item in pairs:
        stored = node if type(node) is str else _own_key(target, node, strange)
        at = prefix + component(stored)
        key = context.renamed(stored) if rename else stored
        if rename and key in found:
            context.require_same(at, key, found[key], item, target)
        elif key not in target:
            context.extra(at, item)
        else:
            plans[key] = _plan(context, target[key], item, at, depth + 1)
        found[key] = item
    if rename:
        context.compare_names(target, found)
    for key, item in target.items():
        if key not in plans:
            context.missing(prefix + component(key), item)

    def fill(lookup: Lookup) -> Any:
        for key, plan in plans.items():
            target[key] = plan(lookup)
        return target

    return fill


def _plan_sequence(
    context: RestoreContext, target: Any, items: list[Node], place: str, depth: int
) -> FillPlan:
    prefix = f"{place}." if place else ""
    plans = [
        _plan(context, own, item, f"{prefix}{index}", depth + 1)
        for index, (own, item) in enumerate(zip(target, items, strict=False))
    ]
    for index in range(len(plans), len(items)):
        context.extra(f"{prefix}{index}", items[index])
    for index in range(len(plans), len(target)):
        plans.append(context.missing(f"{prefix}{index}", target[index]))

    def fill(lookup: Lookup) -> Any:
        found = [plan(lookup) for plan in plans]
        if type(target) is tuple:
            return tuple(found)
        for index, item in enumerate(found):
            target[index] = item
        return target

    return fill


def _own_key(target: Any, node: Node, strange: dict[str, list[Any]]) -> Any:
    """The key of a target that a key's node stands for, or the node's value when it has none.

    NaN equals no other NaN, so it is found by what would be stored for it. `strange` has the target's keys by
    that, once it has been asked for.
    """
    key = decode_key(node)
    if key in target:
        return key
    if not strange:
        strange[""] = []
        for own in target:
            if type(own) is not str:
                strange.setdefault(_stored_form(own), []).append(own)
    twins = strange.get(repr(node))
    return twins.pop(0) if twins else key


def _stored_form(key: Any) -> str:
    try:
        return repr(key_node(key, ""))
    except UnsupportedState:
        return ""  # the form of none
