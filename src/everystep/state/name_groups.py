"""Many dotted names in few words, and guesses at what a wrong one was meant to be. For messages only."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence

from everystep.state.node import shorten

_FEW = 8
"""So many names are listed one by one."""
_MAX_LINES = 20
_MAX_NAME = 200
_MAX_COMPARED = 5000
_GLOB = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


def grouped(names: Sequence[str], fitting: Iterable[str] = (), *, limit: int = _MAX_LINES) -> list[str]:
    """Lines for many names: ``optimizer.* (161 leaves)`` for a subtree of which every leaf is among them.

    `fitting`: names that are not among them, so that a subtree with one of these is not called whole. What
    remains is grouped over its numbers: ``model.h.*.bias (12 leaves)``.
    """
    if len(names) <= min(_FEW, limit):
        return [shorten(name, _MAX_NAME) for name in names]
    lines = _numbered(_folded(list(names), _subtrees(fitting), ""))
    shown = [
        shorten(name, _MAX_NAME) + (f" ({count:,} leaves)" if count > 1 else "")
        for name, count in lines[:limit]
    ]
    rest = sum(count for _, count in lines[limit:])
    return [*shown, f"... and {rest:,} more"] if rest else shown


def did_you_mean(wanted: str, names: Collection[str]) -> str:
    """A question to append to a message, or nothing: for a name that is not there, the one most like it."""
    found = _closest(wanted, list(names)[:_MAX_COMPARED])
    return f"; did you mean {shorten(found, _MAX_NAME)!r}?" if found is not None else ""


def _closest(wanted: str, names: Sequence[str]) -> str | None:
    for name in names:  # all is right but the beginning
        before, dot, _ = f"{name}.".partition(f".{wanted}.")
        if dot:
            return f"{before}.{wanted}"
    place = ""
    children = names
    for part in wanted.split("."):
        known = dict.fromkeys(name.partition(".")[0] for name in children)
        if _GLOB.search(part):  # of a pattern, only the plain parts can be misspelt
            if not any(fnmatch.fnmatchcase(name, part) for name in known):
                return None
            return f"{place}.{wanted.split('.', place.count('.') + 1)[-1]}" if place else None
        if part not in known:
            alike = difflib.get_close_matches(part, list(known), 1)
            if not alike:
                return None
            part = alike[0]
        place += f".{part}" if place else part
        children = [name[len(part) + 1 :] for name in children if name.startswith(f"{part}.")]
    return place


def _subtrees(names: Iterable[str]) -> set[str]:
    """Every prefix of these names that ends before a dot."""
    found: set[str] = {""}
    for name in names:
        at = name.rfind(".")
        while at > 0 and name[:at] not in found:
            found.add(name[:at])
            at = name.rfind(".", 0, at)
    return found


def _folded(names: Sequence[str], fitting: Collection[str], prefix: str) -> list[tuple[str, int]]:
    """Names, and subtrees with the number of names in each."""
    inner: dict[str, list[str]] = {}
    start = len(prefix)
    for name in names:
        end = name.find(".", start)
        inner.setdefault(name if end < 0 else name[: end + 1], []).append(name)
    found: list[tuple[str, int]] = []
    for place, below in inner.items():
        if not place.endswith(".") or len(below) == 1:
            found += [(name, 1) for name in below]
        elif place[:-1] in fitting:
            found += _folded(below, fitting, place)
        else:
            found.append((f"{place}*", len(below)))
    return found


def _numbered(lines: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Names that differ in numbers only as one, where there are too many lines."""
    if len(lines) <= _FEW:
        return lines
    alike: dict[str, list[tuple[str, int]]] = {}
    for name, count in lines:
        alike.setdefault(_NUMBER.sub("*", name), []).append((name, count))
    return [
        same[0] if len(same) == 1 else (pattern, sum(count for _, count in same))
        for pattern, same in alike.items()
    ]
