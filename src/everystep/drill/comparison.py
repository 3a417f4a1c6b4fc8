"""Two trainings compared: every checkpoint that both made, and the last one byte by byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from everystep.checkpointer.drilling import RUNS, contents_of
from everystep.drill.activity import SeenCheckpoint
from everystep.format.dtypes import itemsize
from everystep.store import step_name
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint
from everystep.store.stream.leaf_windows import LeafSize, WindowReader, windows

_NAMED = 20
"""How many differing leaves are named; all of them are counted."""

Reference = Mapping[tuple[str, int], SeenCheckpoint]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step whose checkpoint differs, and its differing names in the order of the manifest.

    `after_kill`: the number of the kill before it; 0 if there was none.
    """

    run: str
    step: int
    kind: Literal["leaf", "value"]
    name: str
    names: tuple[str, ...]
    leaves: int
    leaves_in_all: int
    values: int
    after_kill: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """All checkpoints that both trainings made, by step."""

    compared: int
    differing: int
    first: Difference | None


@dataclass(frozen=True, slots=True)
class Final:
    """The last checkpoints of one run, from the files: `equal` says every leaf's bytes and every value."""

    run: str
    step: int
    reference_step: int
    leaves: int
    nbytes: int
    differing: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.step == self.reference_step and not self.differing


def index(checkpoints: Iterable[SeenCheckpoint]) -> dict[tuple[str, int], SeenCheckpoint]:
    """By run and step. If a step was repeated, the last one counts."""
    return {(checkpoint.run, checkpoint.step): checkpoint for checkpoint in checkpoints}


def agree(reference: Reference, seen: Iterable[tuple[int, SeenCheckpoint]]) -> Agreement:
    """`seen`: what the other training's logs saw, each with the number of kills before."""
    compared: set[tuple[str, int]] = set()
    differing: dict[tuple[str, int], tuple[int, SeenCheckpoint]] = {}
    for kills, checkpoint in seen:
        key = checkpoint.run, checkpoint.step
        if key in reference:
            compared.add(key)
            if reference[key].digest != checkpoint.digest:
                differing.setdefault(key, (kills, checkpoint))
    first = min(differing, key=lambda key: key[1], default=None)
    if first is None:
        return Agreement(len(compared), 0, None)
    kills, checkpoint = differing[first]
    return Agreement(len(compared), len(differing), _difference(reference[first], checkpoint, kills))


def _difference(mine: SeenCheckpoint, other: SeenCheckpoint, kills: int) -> Difference:
    a, b = mine.contents(), other.contents()
    leaves, values = list(_unlike(a.leaves, b.leaves)), list(_unlike(a.values, b.values))
    names = (*leaves, *values)
    return Difference(
        run=mine.run,
        step=mine.step,
        kind="leaf" if leaves else "value",
        name=names[0],
        names=names[:_NAMED],
        leaves=len(leaves),
        leaves_in_all=len(a.leaves),
        values=len(values),
        after_kill=kills,
    )


def _unlike(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[str]:
    yield from (name for name, digest in a.items() if b.get(name) != digest)
    yield from (name for name in b if name not in a)


def compare_last(reference: Path, other: Path, run: str, reference_step: int, step: int) -> Final:
    """The last checkpoint of a run in two stages, byte by byte, in bounded memory."""
    paths = [
        str(stage / RUNS / run / step_name(number))
        for stage, number in ((reference, reference_step), (other, step))
    ]
    with open_checkpoint(paths[0]) as mine, open_checkpoint(paths[1]) as its:
        a, b = contents_of(mine), contents_of(its)
        differing = dict.fromkeys([*_unlike(a.leaves, b.leaves), *_unlike(a.values, b.values)])
        # The checksums of these are equal; with both files at hand, compare the bytes as well.
        infos = mine._parts.leaf_infos
        names = [name for name in infos if name not in differing and infos[name].alias_of is None]
        differing.update(dict.fromkeys(_unequal(mine, its, names)))
        nbytes = sum(infos[name].nbytes for name in names)
        return Final(run, step, reference_step, len(a.leaves), nbytes, tuple(differing))


def _unequal(a: Checkpoint, b: Checkpoint, names: Sequence[str]) -> Iterator[str]:
    """The leaves whose bytes differ. Their checksums are not looked at."""
    infos = a._parts.leaf_infos
    one, other = WindowReader(a, verify=False), WindowReader(b, verify=False)
    for ranges in windows(LeafSize(infos[name].nbytes, itemsize(infos[name].dtype)) for name in names):
        mine, its = one.read(ranges, names), other.read(ranges, names)
        at = 0
        for span in ranges:
            if not np.array_equal(mine[at : at + span.nbytes], its[at : at + span.nbytes]):
                yield names[span.index]
            at += span.nbytes
