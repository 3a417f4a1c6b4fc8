"""One checkpoint as a page shows it: its leaves as columns, its values, and which rank wrote it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from everystep.format.records import Part
from everystep.inspect.description import leaf_order
from everystep.store.read.checkpoint import Checkpoint, open_newest
from everystep.view.budget import Budget
from everystep.view.disks import volume_of
from everystep.view.leaf_samples import LeafSample, sample_leaves
from everystep.view.words import shortened, shown_path

MAX_VALUES = 500
MAX_RANKS = 512


@dataclass(frozen=True, slots=True)
class LeafColumns:
    """One entry per leaf in every column, in the order of the state. `tied`: the leaf it is a name of."""

    name: tuple[str, ...]
    dtype: tuple[str, ...]
    shape: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    framework: tuple[str, ...]
    tied: tuple[str | None, ...]
    sample: tuple[LeafSample | None, ...]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A shard. `volume` and `host`, if it is not in the checkpoint's own directory."""

    name: str
    nbytes: int
    volume: str | None
    host: str | None


@dataclass(frozen=True, slots=True)
class Writer:
    """What one rank wrote: its shards, and how many leaves have bytes in them."""

    rank: int
    files: tuple[WrittenFile, ...]
    nbytes: int
    leaves: int


@dataclass(frozen=True, slots=True)
class NamedValue:
    """A value of the state, as text."""

    name: str
    type: str
    text: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds. `all_values`, `all_writers` count those beyond the limits, too.

    `sampled`: how many leaves have a sample; `read_nbytes` were read and verified for that.
    """

    path: str
    step: int
    created: float
    id: str
    format: str
    world: int
    nbytes: int
    stored_nbytes: int
    leaves: LeafColumns
    sampled: int
    read_nbytes: int
    values: tuple[NamedValue, ...]
    all_values: int
    writers: tuple[Writer, ...]
    all_writers: int
    facts: tuple[tuple[str, str], ...]


def contents(path: str | os.PathLike[str], *, budget: Budget | None = None) -> Contents:
    """What the checkpoint at `path` holds (of a run, its newest), with samples as far as a budget goes.

    Without a budget no array is read.
    """
    with open_newest(path) as checkpoint:
        names = leaf_order(checkpoint)
        before = 0 if budget is None else budget.spent_nbytes
        samples = {} if budget is None else sample_leaves(checkpoint, names, budget)
        values = list(checkpoint.values.items())
        parts = list(checkpoint._parts)
        return Contents(
            path=shown_path(checkpoint.path),
            step=checkpoint.step,
            created=checkpoint.created,
            id=checkpoint.id,
            format=checkpoint._parts.root.format,
            world=checkpoint.world,
            nbytes=checkpoint.nbytes,
            stored_nbytes=checkpoint.stored_nbytes,
            leaves=_columns(checkpoint, names, samples),
            sampled=len(samples),
            read_nbytes=0 if budget is None else budget.spent_nbytes - before,
            values=tuple(
                NamedValue(name, type(value).__name__, shortened(_text(value)))
                for name, value in values[:MAX_VALUES]
            ),
            all_values=len(values),
            writers=tuple(_writer(part, checkpoint.id) for part in parts[:MAX_RANKS]),
            all_writers=len(parts),
            facts=tuple((name, shortened(fact)) for name, fact in checkpoint._facts.items()),
        )


def samples_of(
    path: str | os.PathLike[str], places: list[int], *, budget: Budget
) -> dict[int, LeafSample | None]:
    """Samples of the leaves at these places of `LeafColumns`; None for leaves that hold no numbers.

    Places beyond the budget are left out.
    """
    with open_newest(path) as checkpoint:
        names = leaf_order(checkpoint)
        wanted = {names[place]: place for place in places if 0 <= place < len(names)}
        found: dict[int, LeafSample | None] = {}
        samples = sample_leaves(checkpoint, list(wanted), budget)
        complete = budget.take(0)
        for name, place in wanted.items():
            if name in samples or complete:
                found[place] = samples.get(name)
        return found


def _columns(checkpoint: Checkpoint, names: list[str], samples: dict[str, LeafSample]) -> LeafColumns:
    infos = [checkpoint._parts.leaf_infos[name] for name in names]
    return LeafColumns(
        name=tuple(names),
        dtype=tuple(info.dtype for info in infos),
        shape=tuple(info.shape for info in infos),
        nbytes=tuple(info.nbytes for info in infos),
        framework=tuple(info.framework for info in infos),
        tied=tuple(info.alias_of for info in infos),
        sample=tuple(samples.get(name) for name in names),
    )


def _writer(part: Part, checkpoint_id: str) -> Writer:
    files = tuple(
        WrittenFile(
            file.name,
            file.nbytes,
            None if file.volume is None else volume_of(file.volume, checkpoint_id),
            file.host,
        )
        for file in part.files
    )
    nbytes = sum(fragment.nbytes for leaf in part.leaves for fragment in leaf.fragments)
    return Writer(part.rank, files, nbytes, sum(bool(leaf.fragments) for leaf in part.leaves))


def _text(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "(too long to print)"
