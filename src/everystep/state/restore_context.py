"""What the plans of a restore share: the checkpoint's leaves, the reports of what does not fit, plain plans.

Owns the plans that every kind of target ends in: an array filled by a leaf, a value built from its node, an
object that takes its own state. `restore` walks containers, `restore_modules` and `restore_optimizers` fill
those objects; all three work on one `RestoreContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from everystep.state import jax_arrays, sharded, torch_objects
from everystep.state.boxed import BoxedArray
from everystep.state.destinations import FillPlan, Lookup, MemoryPlan, TiedElsewhere, never_alike
from everystep.state.flatten import names_in
from everystep.state.leaf_table import component
from everystep.state.marks import RankMark
from everystep.state.mismatch import LeafMeta, Mismatch, differing_beginnings
from everystep.state.node import (
    MAX_DEPTH,
    NAMELESS,
    Node,
    blob_names,
    corrupt,
    leaf_names,
    leaf_of,
    per_rank_of,
    per_rank_places,
    shorten,
)
from everystep.state.select import Selection, prune
from everystep.state.targets import MAPPINGS, SEQUENCES, array_type, assign, describe, is_array, load_state
from everystep.state.unflatten import decode, is_blob

Renaming = Callable[[str], str]
"""From the name of a parameter in the checkpoint to its name in the target."""


class RestoreContext:
    """One restore while it is planned. `Restore` says what its parameters mean.

    `own_places` are the places of the state that was saved of this rank alone.
    """

    def __init__(
        self,
        into: object,
        leaves: Mapping[str, LeafMeta],
        aliases: Mapping[str, str],
        only: Selection | None = None,
        *,
        own_places: Collection[str] = (),
        shared: bool = False,
        alike: Callable[[str, str], bool] = never_alike,
        rename: Renaming | None = None,
        strict: bool = True,
    ) -> None:
        self.state = into
        self.strict = strict
        self.only = only
        self.shardings: sharded.Shardings = {}
        self.memory_plan = MemoryPlan(aliases, self.shardings, alike)
        self.lacks = False
        """Whether an array that the target asks for cannot be restored."""
        self.kept: dict[str, None] = {}
        self.left_out: list[str] = []
        self.elsewhere: dict[str, None] = {}
        self.entries: tuple[str, ...] = ()
        """The keys of the checkpoint at its top, for advice."""
        self.load_last: list[Callable[[], None]] = []
        self.misfits: set[str] = set()
        """Places of arrays that have another type in the checkpoint, and stay as they are."""
        self.resized: set[str] = set()
        """Places of parameters whose shape their module decides while it loads."""
        self._leaves = leaves
        self._aliases = aliases
        self._alike = alike
        self._rename = rename
        self._prefixes: tuple[str, str] | None = None
        self._own_places = frozenset(own_places)
        self.shared = shared
        self._last: list[Callable[[], None]] = []
        self._absent: list[tuple[str, object, bool]] = []
        self._missing: list[str] = []
        self._extra: list[str] = []
        self._wrong: list[str] = []
        self._parameters: torch_objects.ParameterNames | None = None

    # --- reports

    def mismatch(self) -> Mismatch:
        """Everything reported so far."""
        if not (self._missing or self._extra or self._wrong):
            return Mismatch((), (), ())
        state = self.state if isinstance(self.state, Mapping) else {}
        keys = tuple(state) if all(type(key) is str for key in state) and self.only is None else ()
        stored = (*self._leaves, *self._aliases)
        return Mismatch(
            tuple(self._missing),
            tuple(self._extra),
            tuple(self._wrong),
            stored,
            keys,
            self._prefixes,
            self.entries,
            self.lacks and not self.memory_plan.used,
        )

    def missing(self, place: str, target: object, *, arrays: bool = False) -> FillPlan:
        """`arrays`: the checkpoint should have some there, though the target has none yet.

        It is no mismatch if all is memory that another leaf fills: tied weights that are stored once.
        """
        if self.only is None or self.only.covers(place):
            self._absent.append((place, target, arrays))
        return lambda lookup: target

    def after_all(self, make: Callable[[], FillPlan]) -> FillPlan:
        """A plan that is made after all others, such as that of an optimizer, which depends on parameters."""
        made: list[FillPlan] = []
        self._last.append(lambda: made.append(make()))
        return lambda lookup: made[0](lookup)

    def settle(self) -> None:
        """Makes the plans that waited for all others, and finds what is missing. Call it after the walk."""
        for make in self._last:
            make()
        for place, target, arrays in self._absent:
            filled = set(self._filled_names(place, target, 0))
            names = [name for name in names_in(target, place, self.state) if name not in filled]
            if filled and not names:
                continue
            self._missing.extend(names)
            arrays |= is_array(target) or jax_arrays.is_array(target)
            self.lacks |= arrays or names != [place or NAMELESS]

    def _filled_names(self, place: str, target: Any, depth: int) -> Iterator[str]:
        """The names of arrays in a part of the target whose memory is filled by other leaves."""
        if depth > MAX_DEPTH:
            return
        prefix = f"{place}." if place else ""
        if is_array(target):
            if self.memory_plan.filled.covers(target):
                yield place or NAMELESS
        elif isinstance(target, RankMark):
            yield from self._filled_names(place, target.value, depth + 1)
        elif type(target) in SEQUENCES:
            for index, item in enumerate(target):
                yield from self._filled_names(f"{prefix}{index}", item, depth + 1)
        elif type(target) in MAPPINGS or torch_objects.is_module(target):
            items = target
            if torch_objects.is_module(target):
                items = torch_objects.module_state(torch_objects.plain_module(target))
            for key, item in items.items():
                yield from self._filled_names(prefix + component(key), item, depth + 1)

    def extra(self, place: str, node: Node) -> None:
        if self.only is None and (place in self._own_places or per_rank_of(node) is not None):
            self.left_out.append(place)
        elif self.shared:
            self.others(node)
        elif self.only is None:
            self._extra.extend(list(leaf_names(node)) or [place or NAMELESS])
        else:
            names = [name for name in leaf_names(node) if name in self.only]
            self._extra.extend(names or ([place] if self.only.covers(place) else []))

    def others(self, node: Node) -> None:
        """Notes that what the node holds belongs to other ranks."""
        for name in leaf_names(node):
            if self.only is None or name in self.only:
                self.elsewhere[name] = None

    def wrong(self, place: str, found: str, target: object, wanted: str) -> FillPlan:
        self.lacks = True
        self._wrong.append(f"{place or NAMELESS}: checkpoint {found}, target {wanted}")
        return lambda lookup: target

    # --- names

    def renamed(self, key: Any) -> Any:
        """What a parameter of the checkpoint is called in the target."""
        return self._rename(key) if self._rename is not None and type(key) is str else key

    def require_same(self, place: str, key: str, one: Node, other: Node, target: object) -> None:
        """Two entries of the checkpoint have one name in the target: they must be the same bytes."""
        first, second = leaf_of(one), leaf_of(other)
        if first is not None and second is not None:
            first, second = self.meta(first).name, self.meta(second).name
            if first == second or self._alike(first, second):
                return
        self.wrong(place, "has another entry of that name, too", target, f"takes one {key!r}")

    def compare_names(self, target: Iterable[Any], checkpoint: Iterable[Any]) -> None:
        """Finds out whether all names of parameters at a place differ by one prefix. For the advice only."""
        if self._rename is not None:
            return
        here, there = set(target), dict.fromkeys(key for key in checkpoint if type(key) is str)
        absent = [key for key in target if type(key) is str and key not in there]
        found = differing_beginnings(absent, [key for key in there if key not in here])
        if found is None or self._prefixes is not None:
            return
        new, old = found
        renamed = [new + key.removeprefix(old) if key.startswith(old) else key for key in there]
        fitting = len(here.intersection(renamed))
        if fitting > len(here.intersection(there)) and len(set(renamed)) == len(renamed):
            self._prefixes = old, new

    # --- what is selected

    def refused(
        self, *, missing: Iterable[str] = (), extra: Iterable[str] = (), wrong: Iterable[str] = ()
    ) -> None:
        """Adds what a module that decides by itself did not take."""
        self._missing.extend(missing)
        self._extra.extend(extra)
        self._wrong.extend(wrong)

    def leaves_out(self, node: Node, place: str) -> bool:
        """Whether nothing of this node is to be restored."""
        if self.only is None or self.only.reaches(place):
            return False
        return not any(name in self.only for name in leaf_names(node))

    def takes_all(self, node: Node, place: str) -> bool:
        """Whether all of this node is to be restored, or all of its leaves."""
        if self.only is None or self.only.covers(place):
            return True
        names = list(leaf_names(node))
        return bool(names) and all(name in self.only for name in names)

    def looks_inside(self, place: str) -> bool:
        """Whether something below a place is selected by its own place."""
        return self.only is not None and self.only.reaches(place) and not self.only.covers(place)

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

    def fits(self, target: Any, name: str, place: str) -> bool:
        """Whether an array of the target is of the type and shape of a leaf."""
        meta = self.meta(name)
        return (meta.dtype, tuple(meta.shape)) == array_type(target, place, self.shardings)

    # --- plans

    def plan_new(self, node: Node, target: object = None, *, place: str | None = None) -> FillPlan:
        """Build what the node says, reusing containers of `target`; its leaves are read into new arrays.

        `place`: of a node that need not be selected as a whole.
        """
        if self.only is not None and place is not None and not self.takes_all(node, place):
            node = prune(node, self.only, place)
        for name in leaf_names(node):
            self.memory_plan.want(self.meta(name).name)
        for name in blob_names(node):
            if not is_blob(self.meta(name).dtype, self.meta(name).shape):
                corrupt(f"leaf {shorten(name)!r} is an array, where bytes belong")
        self.kept.update(dict.fromkeys(per_rank_places(node)))
        return lambda lookup: assign(target, decode(node, lookup))

    def plan_stateful(self, target: Any, node: Node, place: str) -> FillPlan:
        """Hand an object its state; one that says ``restore_last = True`` gets it after all others.

        Random number generators say so: others draw from them while they load.
        """
        build = self.plan_new(node)
        last = getattr(target, "restore_last", False) is True

        def load(lookup: Lookup) -> Any:
            state = build(lookup)
            if last:
                self.load_last.append(lambda: load_state(target, state, place))
            else:
                load_state(target, state, place)
            return target

        return load

    def plan_leaf(self, target: Any, name: str, place: str) -> FillPlan:
        """Read a leaf into an array of the target, in place where its memory allows."""
        if not self.fits(target, name, place):
            self.misfits.add(place)
            wanted = describe(*array_type(target, place, self.shardings))
            return self.wrong(name, str(self.meta(name)), target, wanted)
        if isinstance(target, BoxedArray):
            return self.memory_plan.plan_boxes(target, name)
        try:
            return self.memory_plan.plan_array(target, name, place)
        except TiedElsewhere as tied:
            return self.wrong(name, f"stored apart from {tied}", target, "tied to it")
