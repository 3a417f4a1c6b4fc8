"""Which leaves of a checkpoint names and globs select."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from everystep.errors import StateMismatch
from everystep.state import Node, leaf_names
from everystep.state.name_groups import did_you_mean
from everystep.state.node import localized
from everystep.state.select import Selection, nodes_at
from everystep.store.read.parts import Parts


def select_leaves(parts: Parts, patterns: str | Iterable[str]) -> list[str]:
    """Names of the leaves that match: by a glob, or by the name of a subtree, such as ``model``.

    Raises `StateMismatch` if a pattern matches no leaf: it is a typing mistake, or the name of a value.
    """
    chosen = _by_pattern(parts, patterns, 0)
    for pattern, (names, _) in chosen.items():
        if not names and pattern != "*":
            raise _no_match(parts, pattern)
    return list(dict.fromkeys(name for names, _ in chosen.values() for name in names))


def select_state(parts: Parts, patterns: str | Iterable[str], *, rank: int = 0) -> Selection:
    """What patterns select of a state: leaves, and subtrees with all the values in them.

    A leaf whose name has brackets or stars is matched by that name, whatever it means as a pattern. State of
    single ranks is matched by ``*``, and by patterns that begin with its ``@``. The state of `rank` is also
    matched by its name without ``@N.``, so that one pattern does for all ranks.
    """
    chosen = _by_pattern(parts, patterns, rank)
    leaves = frozenset(name for names, _ in chosen.values() for name in names)
    return Selection(leaves, frozenset(place for place, (_, is_place) in chosen.items() if is_place))


def matching_names(names: Mapping[str, str], pattern: str) -> list[str]:
    """The keys of `names` whose values match a pattern.

    A pattern is a glob or, whatever it means as a glob, a leaf's own name. If no leaf has that name, it is
    that of a subtree: ``model`` stands for ``model.w`` and ``model.h.0.w``.
    """
    subtree = f"{pattern}."
    below = []
    if not any(shown == pattern for shown in names.values()):
        below = [name for name, shown in names.items() if shown.startswith(subtree)]
    return below or [
        name for name, shown in names.items() if shown == pattern or fnmatch.fnmatchcase(shown, pattern)
    ]


def _by_pattern(parts: Parts, patterns: str | Iterable[str], rank: int) -> dict[str, tuple[list[str], bool]]:
    """For each pattern the leaves that match, and whether it is the place of a subtree or value."""
    found: dict[str, tuple[list[str], bool]] = {}
    for pattern in _patterns(patterns):
        if pattern == "*" or pattern.startswith("@"):
            names = {name: name for name in parts.leaf_infos}
        else:  # not those of other ranks: no rank should have to open all parts
            names = {name: name for name in (*parts.metas, *parts.aliases)}
            names.update(_own_names(parts, rank))
        matching = matching_names(names, pattern)
        nodes: list[Node] = []
        if not any(shown == pattern for shown in names.values()):
            nodes = nodes_at(localized(parts.tree, parts.local(rank)), pattern)
            inside = [name for node in nodes for name in leaf_names(node)]
            matching = list(dict.fromkeys([*matching, *inside]))
        # A rank that did not take part in the save has no state of its own to select. Rank 0 always has.
        if not (matching or nodes or pattern == "*" or matching_names(_own_names(parts, 0), pattern)):
            raise _no_match(parts, pattern)
        found[pattern] = matching, bool(nodes)
    return found


def _own_names(parts: Parts, rank: int) -> dict[str, str]:
    """The names of a rank's own leaves, and the same without the rank."""
    return {name: name.removeprefix(f"@{rank}.") for name in parts.own_names(rank)}


def _no_match(parts: Parts, pattern: str) -> StateMismatch:
    values = parts.values
    if pattern in values:
        reason = f"{pattern!r} of {parts.path} is a value, not a leaf or a subtree of leaves"
    else:
        guess = did_you_mean(pattern, [*parts.leaf_infos, *values])
        reason = f"no leaf of {parts.path} matches {pattern!r}{guess or '; `everystep show` lists them'}"
    return StateMismatch(reason, missing=[pattern])


def _patterns(select: object) -> list[str]:
    patterns: list[Any] = [select]
    if isinstance(select, Iterable) and not isinstance(select, str | bytes | bytearray):
        patterns = list(select)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"leaves are selected by names or globs, not by {type(pattern).__name__}")
    return patterns
