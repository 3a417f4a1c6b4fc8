"""Filling a state that already exists: what is read straight into its memory, what is put back afterwards.

Owns the comparison of a checkpoint with its target and the plan of the restore, for containers, arrays,
values and objects with ``load_state_dict``. Modules and optimizers belong to `restore_modules` and
`restore_optimizers`, memory to `landings`. Reading is the store's: it fills `destinations` and reads `fresh`,
then hands the fresh arrays to `finish`.

Target and tree are walked side by side, so a place is matched with a place and names never need to be parsed.
Each place becomes a *plan*: a function that is given the arrays once they are read and returns what belongs
there. Plans run in the order of the tree, but for objects that ask to be restored last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from holdfast.engine.buffers import Destination
from holdfast.errors import UnsupportedState
from holdfast.state import sharded, torch_objects
from holdfast.state.destinations import Landings, Lookup, Plan, TiedElsewhere, never_alike
from holdfast.state.flatten import component, key_node, names_in
from holdfast.state.leaves import Sharding
from holdfast.state.mismatch import LeafMeta, Mismatch
from holdfast.state.node import (
    MAX_DEPTH,
    NAMELESS,
    Node,
    blob_names,
    corrupt,
    holds_arrays,
    holds_leaves,
    holds_per_rank,
    items_of,
    leaf_names,
    leaf_of,
    localized,
    pairs_of,
    per_rank_of,
    per_rank_places,
    shorten,
)
from holdfast.state.per_rank import PerRank
from holdfast.state.select import prune
from holdfast.state.targets import (
    MAPPINGS,
    SEQUENCES,
    array_type,
    assign,
    describe,
    has_arrays,
    holds_strangers,
    is_array,
    is_value_target,
    kind_of,
    load_state,
)
from holdfast.state.unflatten import decode, decode_key, is_blob
from holdfast.state.value_encoder import type_name, unfillable


class Restore:
    """The plan for putting a checkpoint back into `into`. Nothing is changed before the store reads.

    Read every leaf of `destinations` to where it says, and every leaf of `fresh` into a new array; then call
    `finish` with the new arrays. Leaves that are in neither do not fit (see `mismatch`) and need no reading.
    Of a leaf that is in `parts`, only a part goes to its destination: how, and the shape of what is here.
    (Its name may be an alias, where leaves tied in the checkpoint lie differently here; and it may be in
    `fresh` as well, if another place takes it whole.)

    `local` has the nodes of what was saved of one rank alone; places without them stay as they are, and are
    listed in `kept`. Such state that has no place here is no mismatch, and listed in `left_out`: on another
    number of ranks, a position in the data means nothing. With `shared`, the checkpoint is that of many ranks
    and may have more than this one: leaves that have no place here are listed in `elsewhere`. Of a sharded
    optimizer, those of other ranks always are. With `only`, every place that holds none of these leaves stays
    as it is. `alike` says whether two leaves have the same bytes: then they may be one array in the target.
    """

    def __init__(
        self,
        into: object,
        tree: Node,
        leaves: Mapping[str, LeafMeta],
        aliases: Mapping[str, str],
        only: Collection[str] | None = None,
        *,
        local: Mapping[str, Node] | None = None,
        shared: bool = False,
        alike: Callable[[str, str], bool] = never_alike,
    ) -> None:
        self._only = only
        self._shared = shared
        self._own = frozenset(local or ())
        self._left_out: list[str] = []
        self._leaves = leaves
        self._aliases = aliases
        self._missing: list[str] = []
        self._extra: list[str] = []
        self._wrong: list[str] = []
        self._kept: dict[str, None] = {}
        self._elsewhere: dict[str, None] = {}
        self.shardings: sharded.Shardings = {}
        self._landings = Landings(aliases, self.shardings, alike)
        self._lacks = False
        self._last: list[Callable[[], None]] = []
        self.state = into
        self._parameters: torch_objects.ParameterNames | None = None
        self._plan = self.plan(into, localized(tree, local), "", 0)
        self._landings.settle_overlaps()
        self.destinations: dict[str, Destination] = self._landings.destinations
        self.parts: dict[str, tuple[Sharding, tuple[int, ...]]] = self._landings.parts
        self.fresh: tuple[str, ...] = self._landings.fresh()
        self.kept: tuple[str, ...] = tuple(self._kept)
        self.left_out: tuple[str, ...] = tuple(self._left_out)
        self.elsewhere: tuple[str, ...] = tuple(self._elsewhere)
        self.mismatch = Mismatch(tuple(self._missing), tuple(self._extra), tuple(self._wrong))
        self.fills: bool = self._landings.used
        """Whether any leaf of the checkpoint has a place in the target."""
        self.lacks: bool = self._lacks or (only is not None and bool(self.mismatch))
        """Whether a leaf that the target, or `only`, asks for cannot be restored."""

    def finish(self, arrays: Mapping[str, object]) -> object:
        """Put everything that is not an array in place back, and return the restored state.

        Dicts, lists, modules and optimizers of the target are the same objects as before; tuples are rebuilt.
        """
        self._landings.tell_autograd()
        lookup = self._landings.lookup(arrays)
        self._landings.join_overlaps(lookup)
        restored = self._plan(lookup)
        for load in self._last:
            load()
        return restored

    # --- reports, for this module and those of modules and optimizers

    def missing(self, place: str, target: object, *, arrays: bool = False) -> Plan:
        """`arrays`: the checkpoint should have some there, though the target has none yet."""
        if self._only is None:
            names = names_in(target, place, self.state)
            self._missing.extend(names)
            self._lacks |= arrays or is_array(target) or names != [place or NAMELESS]
        return lambda lookup: target

    def extra(self, place: str, node: Node) -> None:
        if self._only is None and (place in self._own or per_rank_of(node) is not None):
            self._left_out.append(place)
        elif self._shared:
            self.others(node)
        elif self._only is None:
            self._extra.extend(list(leaf_names(node)) or [place or NAMELESS])
        else:
            self._extra.extend(name for name in leaf_names(node) if name in self._only)

    def others(self, node: Node) -> None:
        """What the node holds belongs to other ranks."""
        for name in leaf_names(node):
            if self._only is None or name in self._only:
                self._elsewhere[name] = None

    def wrong(self, place: str, found: str, target: object, wanted: str) -> Plan:
        self._lacks = True
        self._wrong.append(f"{place or NAMELESS}: checkpoint {found}, target {wanted}")
        return lambda lookup: target

    def leaves_out(self, node: Node) -> bool:
        """Whether nothing of this node is to be restored."""
        return self._only is not None and not any(name in self._only for name in leaf_names(node))

    def takes_all(self, node: Node) -> bool:
        return self._only is None or all(name in self._only for name in leaf_names(node))

    def parameter_names(self) -> torch_objects.ParameterNames:
        if self._parameters is None:
            self._parameters = torch_objects.parameter_names(self.state)
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
            raise unfillable(
                place[:200], f"nested deeper than {MAX_DEPTH} levels, or a container holds itself"
            )
        if self.leaves_out(node):
            return lambda lookup: target
        mark = per_rank_of(node)
        if mark is not None:
            self._kept[mark] = None
            return lambda lookup: target
        if type(target) is PerRank:
            return self._plan_per_rank(target, node, place, depth)
        if is_array(target):
            return self._plan_array(target, node, place)
        if type(target) in MAPPINGS or type(target) in SEQUENCES:
            return self._plan_container(target, node, place, depth)
        if torch_objects.is_module(target):
            from holdfast.state import restore_modules

            inner = restore_modules.plan_module(self, torch_objects.plain_module(target), node, place)
            return lambda lookup: (inner(lookup), target)[1]
        if torch_objects.is_stateful(target) and not self.takes_all(node):
            return self.wrong(place, "has only some of its leaves selected", target, "takes all or none")
        if torch_objects.is_optimizer(target):
            from holdfast.state import restore_optimizers

            return restore_optimizers.plan_optimizer(self, target, node, place)
        if torch_objects.is_stateful(target):
            return self.plan_stateful(target, node, place)
        return self._plan_other(target, node, place)

    def _plan_other(self, target: Any, node: Node, place: str) -> Plan:
        """Values are replaced by what was saved, and so is None, by which a target says nothing.

        A number may have become an array since. But nothing else knows how to take arrays, and who gives it
        as a target believes that they are in it afterwards.
        """
        may_change = target is None or (is_value_target(target) and leaf_of(node) is not None)
        if may_change or not holds_arrays(node):
            return self.plan_new(node, target)
        held = kind_of(node) if leaf_of(node) is not None else f"{kind_of(node)} with arrays"
        return self.wrong(
            place, f"holds {held}", target, f"of type {type_name(target)}, which cannot take it"
        )

    def plan_new(self, node: Node, target: object = None) -> Plan:
        """Build what the node says, reusing containers of `target`; its leaves are read into new arrays."""
        if self._only is not None and not self.takes_all(node):
            node = prune(node, self._only)
        for name in leaf_names(node):
            self._landings.want(self.meta(name).name)
        for name in blob_names(node):
            if not is_blob(self.meta(name).dtype, self.meta(name).shape):
                corrupt(f"leaf {shorten(name)!r} is an array, where bytes belong")
        self._kept.update(dict.fromkeys(per_rank_places(node)))
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

    def _plan_per_rank(self, target: PerRank[Any], node: Node, place: str, depth: int) -> Plan:
        inner = self.plan(target.value, node, place, depth + 1)

        def fill(lookup: Lookup) -> Any:
            target.value = inner(lookup)
            return target

        return fill

    def _plan_array(self, target: Any, node: Node, place: str) -> Plan:
        name = leaf_of(node)
        if name is None:
            return self.wrong(place, f"holds {kind_of(node)}", target, f"a {type_name(target)}")
        return self.plan_leaf(target, name, place)

    def plan_leaf(self, target: Any, name: str, place: str) -> Plan:
        """Read a leaf into an array of the target, in place where its memory allows."""
        meta = self.meta(name)
        dtype, shape = array_type(target, place, self.shardings)
        if (meta.dtype, tuple(meta.shape)) != (dtype, shape):
            return self.wrong(name, str(meta), target, describe(dtype, shape))
        try:
            return self._landings.land(target, name, place)
        except TiedElsewhere as tied:
            return self.wrong(name, f"stored apart from {tied}", target, "tied to it")

    def _plan_container(self, target: Any, node: Node, place: str, depth: int) -> Plan:
        # Plain values, or a place still empty: take over what was saved. But a target that names some keys
        # and finds arrays under others in the checkpoint is compared key by key; and so is one of which some
        # places are to stay as they are.
        apart = holds_arrays(node) if self._only is None else holds_leaves(node)
        keyed = bool(target) and type(target) in MAPPINGS and pairs_of(node) is not None
        if not (
            has_arrays(target, depth)
            or (apart and (keyed or holds_strangers(target, depth)))
            or (target and holds_per_rank(node))
        ):
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
        strange: dict[str, list[Any]] = {}
        for node, item in pairs:
            key = node if type(node) is str else _own_key(target, node, strange)
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
