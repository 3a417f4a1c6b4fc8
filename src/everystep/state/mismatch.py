"""What a checkpoint says about its leaves, and where it does not fit a target.

Owns the two records and their words, and which arguments these words may suggest; `restore` does the
comparing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import msgspec

from everystep.errors import StateMismatch
from everystep.format.dtypes import itemsize
from everystep.state.leaves import Framework
from everystep.state.name_groups import did_you_mean, grouped
from everystep.state.node import shorten
from everystep.state.targets import describe

_offered: ContextVar[frozenset[str] | None] = ContextVar("offered", default=None)


@contextmanager
def offering(*arguments: str) -> Iterator[None]:
    """Inside, messages suggest only these arguments: those of the call that the user has made.

    Of calls within calls, the outermost counts.
    """
    if _offered.get() is not None:
        yield
        return
    token = _offered.set(frozenset(arguments))
    try:
        yield
    finally:
        _offered.reset(token)


def _offers(argument: str) -> bool:
    return argument in (_offered.get() or ())


class LeafMeta(msgspec.Struct, frozen=True, gc=False):
    """What a checkpoint says about one leaf."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    framework: Framework

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * itemsize(self.dtype)

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
    stored: Collection[str] = field(default=(), compare=False, repr=False)
    """All leaves of the checkpoint, by which a subtree is known to be missing as a whole."""
    keys: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """What the target has at its top, if it is a mapping with names for keys."""
    prefixes: tuple[str, str] | None = field(default=None, compare=False, repr=False)
    """How names of parameters begin in the checkpoint, and in the target, where that is all that differs."""
    entries: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """What the checkpoint has at its top, if it is a mapping with names for keys."""
    fits_nothing: bool = field(default=False, compare=False, repr=False)
    """Whether the target asks for arrays, and none of the checkpoint fits."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.wrong)

    def __str__(self) -> str:
        fitting = set(self.stored).difference(self.extra)
        parts = [
            f"{title} ({len(names):,}):\n    " + "\n    ".join(lines)
            for title, names, lines in (
                ("missing from the checkpoint", self.missing, grouped(self.missing, fitting)),
                ("not in the target", self.extra, grouped(self.extra, fitting)),
                ("different", self.wrong, _abridged(self.wrong)),
            )
            if names
        ]
        return "\n  ".join(["checkpoint and target do not fit", *parts])

    def hint(self) -> str:
        """A line on what may be the reason, or nothing."""
        said = self._beginnings()
        return f"\n  {said}" if said is not None else ""

    def with_extra(self, names: Iterable[str]) -> Mismatch:
        """The same, with more names that only the checkpoint has."""
        return replace(self, extra=(*self.extra, *names))

    def error(self, where: str = "") -> StateMismatch:
        advice = self._advice()
        fix = "Fix the target."
        if _offers("strict") and not self.fits_nothing:
            fix = "Fix the target, or pass strict=False to restore what fits."
        return StateMismatch(
            f"{where}{': ' if where else ''}{self}\n"
            + "".join(f"  {line}\n" for line in advice)
            + f"  Nothing has been changed. {fix}",
            missing=self.missing,
            extra=self.extra,
            wrong=self.wrong,
        )

    def _advice(self) -> list[str]:
        """Guesses at what was meant."""
        if not self.missing and not self.wrong:
            tops = {name.partition(".")[0] for name in self.extra}
            others = not tops.intersection(key.partition(".")[0] for key in self.keys)
            if self.keys and others and _offers("select"):
                names = [_quoted(key) for key in self.keys]
                chosen = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
                return [f"To load only what the target has, call load(..., select={chosen})."]
            return []
        guess = self._beginnings()
        if guess is not None:
            return [guess]
        questions = []
        have = {name.partition(".")[0] for name in self.stored}
        for top in dict.fromkeys(name.partition(".")[0] for name in self.missing):
            if top not in have and (question := did_you_mean(top, have)):
                questions.append(f"The checkpoint has no {top!r}{question}")
        return questions[:_FEW]

    def _beginnings(self) -> str | None:
        """A sentence, if names of the two sides differ in how they begin, and in nothing else."""
        if self.prefixes is None:
            return self._entry() or another_prefix(self.missing, self.extra)
        there, here = self.prefixes
        if not here:
            said = f"Names of parameters begin with {there!r} in the checkpoint, but not in the target."
        elif not there:
            said = f"Names of parameters begin with {here!r} in the target, but not in the checkpoint."
        else:
            said = (
                f"Names of parameters that begin with {there!r} in the checkpoint begin with {here!r} "
                "in the target."
            )
        if not _offers("rename"):
            return said
        return f"{said} To restore them, pass rename={{{_quoted(there)}: {_quoted(here)}}}."

    def _entry(self) -> str | None:
        """A sentence, if the checkpoint itself is the state dict for an entry of the target."""
        found = differing_beginnings(self.missing, self.extra)
        if found is None:
            return None
        (entry, _, inner), there = found[0].partition("."), found[1]
        if entry not in self.keys or there.partition(".")[0] in self.entries:
            return None
        said = f"The checkpoint has no entries such as {entry!r}: it is one state dict itself."
        if not _offers("into"):
            return said
        said += f" Pass what the target has under {entry!r} as into="
        if inner == there or not _offers("rename"):
            return f"{said}."
        return f"{said}, and rename={{{_quoted(there)}: {_quoted(inner)}}}."

    def nothing(self, where: str) -> StateMismatch:
        """The error message of a restore of what fits, if no array fits."""
        sides = [
            f"{title} ({len(names)}):\n    " + "\n    ".join(_abridged(names, _FEW))
            for title, names in (
                ("the target has", self.missing),
                ("the checkpoint has", self.extra),
                ("different", self.wrong),
            )
            if names
        ]
        guess = self._beginnings()
        text = [
            f"{where}: no array of the checkpoint fits the target, so strict=False has none to restore",
            *sides,
            *([guess] if guess else []),
            "Nothing has been changed. Give the target the names and shapes of the checkpoint.",
        ]
        return StateMismatch(
            "\n  ".join(text),
            missing=self.missing,
            extra=self.extra,
            wrong=self.wrong,
        )


_FEW = 5
_TRIED = 64
"""So many pairs of names are looked at for a common ending."""


def differing_beginnings(target: Sequence[str], checkpoint: Sequence[str]) -> tuple[str, str] | None:
    """How most names begin in the target and in the checkpoint, if they differ in nothing else."""
    best, most = None, min(len(target), len(checkpoint)) // 2
    stored = set(checkpoint)
    for own in target[:4]:
        for other in checkpoint[:_TRIED]:
            here, there = _beginnings(own, other)
            if here == there:
                continue
            alike = sum(name.startswith(here) and there + name[len(here) :] in stored for name in target)
            if alike > most:
                best, most = (here, there), alike
    return best


def another_prefix(target: Sequence[str], checkpoint: Sequence[str]) -> str | None:
    """A sentence, if most names of leaves differ in how they begin, and in nothing else."""
    best = differing_beginnings(target, checkpoint)
    if best is None:
        return None
    here, there = best
    if not here:
        said = f"The names of the target have {there!r} before them in the checkpoint"
        entry = f"{{{_quoted(there[:-1])}: ...}}"
        return f"{said}: did you mean into={entry}?" if _offers("into") else f"{said}."
    if not there:
        return f"The names of the target begin with {here!r}; those of the checkpoint do not."
    said = f"Names that begin with {here!r} in the target begin with {there!r} in the checkpoint"
    if here.count(".") == there.count(".") == 1:
        return f"{said}: did you mean {there[:-1]!r}?"
    return f"{said}."


def _quoted(text: str) -> str:
    """Ready to be pasted."""
    return json.dumps(text, ensure_ascii=False)


def _beginnings(one: str, other: str) -> tuple[str, str]:
    """How two dotted names begin, before the longest ending that they share. Equal: they share none."""
    left, right = one.split("."), other.split(".")
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    if count == 0:
        return "", ""
    heads = [".".join(parts[: len(parts) - count]) for parts in (left, right)]
    return tuple(f"{head}." if head else "" for head in heads)  # type: ignore[return-value]


def _abridged(names: tuple[str, ...], limit: int = 20) -> list[str]:
    shown = [shorten(name, 200) for name in names[:limit]]
    return shown if len(names) <= limit else [*shown, f"... and {len(names) - limit} more"]
