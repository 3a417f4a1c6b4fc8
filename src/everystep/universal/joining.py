"""All parameters of a checkpoint by a spec: the tensors of ranks to leaves and tied names.

`union` joins one parameter. This module does it for all of them, and keeps the promises about tied ones: what
a tied name holds in the files becomes a further copy of the leaf, so that a difference is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from everystep.errors import CorruptCheckpoint
from everystep.universal.rules import Replicated, Rule
from everystep.universal.source import SourceLeaf
from everystep.universal.spec import Assigned
from everystep.universal.torch_file.reading import StoredTensor
from everystep.universal.union import Extent, LocalTensor, union

Holders = Sequence[Sequence[StoredTensor]]
"""For each tensor-parallel rank its tensor, and copies of it (see `union`)."""


def join(
    taken: Sequence[Assigned], held: Mapping[str, Holders], prefix: str = "model.", suffix: str = ""
) -> dict[str, SourceLeaf]:
    """The leaves of the parameters that `held` has, by their new names; of tied ones, the same leaf.

    Messages name leaves with `prefix` and `suffix`.
    """
    rules = {found.new_name: found.rule for found in taken}
    leaves: dict[str, SourceLeaf] = {}
    for found in taken:
        if found.tied_to is None and found.name in held:
            name = prefix + found.new_name + suffix
            leaves[found.new_name] = join_one(found.name, name, found.rule, held[found.name])
    ties = {
        found.new_name: found.tied_to
        for found in taken
        if found.tied_to is not None and found.tied_to in leaves
    }
    for found in taken:
        if found.new_name in ties and found.tied_to is not None and found.name in held:
            of = leaves[found.tied_to]
            same = join_one(found.name, of.name, rules[found.tied_to], held[found.name])
            _require_same_kind(same, of, found)
            leaves[found.tied_to] = replace(of, copies=(*of.copies, same.fragments, *same.copies))
    return {**leaves, **{name: leaves[of] for name, of in ties.items()}}


def join_one(name: str, leaf: str, rule: Rule, holders: Holders) -> SourceLeaf:
    """The leaf of one parameter."""
    dtypes = {stored.dtype: stored.file for copies in holders for stored in copies}
    if len(dtypes) > 1:
        shown = ", ".join(f"{dtype} in {file}" for dtype, file in dtypes.items())
        raise CorruptCheckpoint(f"its type differs between ranks: {shown}", leaf=leaf)
    locals_ = [[local_tensor(stored, name) for stored in copies] for copies in holders]
    return union(name, next(iter(dtypes), "F32"), rule, locals_, leaf=leaf)


def replicated_rule(rule: Rule) -> Rule:
    """For state that is not of the parameter's shape (a step count): every rank has the same."""
    return Rule(rule.match, Replicated())


def local_tensor(stored: StoredTensor, name: str) -> LocalTensor:
    """A tensor of a torch file as `union` takes it."""
    extents: list[Extent] = []
    at = 0
    for fragment in stored.fragments(leaf=name):
        extents.append(Extent(fragment.file, fragment.offset, at, at + fragment.box.volume))
        at += fragment.box.volume
    return LocalTensor(stored.shape, tuple(extents))


def _require_same_kind(one: SourceLeaf, other: SourceLeaf, found: Assigned) -> None:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise CorruptCheckpoint(
            f"it is tied to {found.tied_to!r}, but has shape {list(one.shape)} and type {one.dtype}, "
            f"not {list(other.shape)} and {other.dtype}",
            leaf=found.name,
        )
