"""What a conversion writes: which leaves, under which names, in which type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from everystep.engine import Tuning
from everystep.format.dtypes import itemsize
from everystep.state import Node, prune
from everystep.state.node import localized
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.stream.element_casts import FLOATS, little_endian
from everystep.store.stream.progress import Progress
from everystep.universal.spec import Spec
from everystep.universal.split import TargetLayout

MODEL: Final = "model."
_OPTIMIZER = "optimizer."
_TYPES: Final = {
    **dict.fromkeys(("f64", "fp64", "float64", "double"), "F64"),
    **dict.fromkeys(("f32", "fp32", "float32", "float"), "F32"),
    **dict.fromkeys(("f16", "fp16", "float16", "half"), "F16"),
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
}


@dataclass(frozen=True, slots=True)
class Item:
    """A stored leaf that is written under `name`, with elements of type `dtype`."""

    stored: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion. `tied`: further names, and the item's name that each means. `tree` has them all,
    with `local`, the trees of what belongs to rank 0 alone. `layout` and `spec`: into how many ranks a target
    cuts the parameters, and the rules that the user gave for that, if any. `zero_stage`: what DeepSpeed is to
    load the result with, if the user said. `verify`: the result is read and compared before it gets its name.
    """

    checkpoint: Checkpoint
    path: str
    items: tuple[Item, ...]
    tied: Mapping[str, str]
    tree: Node
    local: Mapping[str, Node]
    overwrite: bool
    verify: bool
    max_shard_nbytes: int
    carried: tuple[str, ...]
    layout: TargetLayout
    spec: Spec | None
    zero_stage: int | None
    tuning: Tuning
    progress: Progress

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def prefix(self) -> str:
        """The prefix that names lose in files for weights: ``model.`` if all names have it, else none."""
        names = [*(item.name for item in self.items), *self.tied]
        return MODEL if names and all(name.startswith(MODEL) for name in names) else ""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that a target writes: its name below the target, empty for the target itself."""

    name: str
    nbytes: int


def type_named(name: str | None) -> str | None:
    """The element type of a name as users write it."""
    if name is None:
        return None
    found = name if name in FLOATS else _TYPES.get(name.lower().removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype must be one of float64, float32, float16, bfloat16, not {name!r}")
    return found


def choose(
    checkpoint: Checkpoint, select: str | Iterable[str] | None, *, only_model: bool, local: bool
) -> list[str]:
    """The names of the leaves to write.

    Without `select`, all that one process would load; with `only_model`, those of the model, if there are
    any. Leaves of single ranks are left out, unless `local` is set.
    """
    if select is not None:
        return [name for name in checkpoint.select(select) if local or not name.startswith("@")]
    names = [name for name in checkpoint._parts.names_for(0) if local or not name.startswith("@")]
    model = [name for name in names if name.startswith(MODEL)]
    return model if only_model and model else names


def items_of(
    checkpoint: Checkpoint, names: Sequence[str], dtype: str | None, *, big_endian: bool
) -> tuple[tuple[Item, ...], dict[str, str]]:
    """Every stored leaf once, under the first of its names; and the other names.

    `big_endian`: the target keeps the order of bytes.
    """
    items: dict[str, Item] = {}
    tied: dict[str, str] = {}
    for name in names:
        info = checkpoint._parts.leaf_infos[name]
        stored = info.alias_of or name
        if stored in items:
            tied[name] = items[stored].name
            continue
        # Moments and step counts lose their meaning in a narrow type.
        known = info.dtype if big_endian else little_endian(info.dtype)
        casts = dtype is not None and known in FLOATS and not name.startswith(_OPTIMIZER)
        to = dtype if casts and dtype is not None else known
        nbytes = info.nbytes if to == info.dtype else info.nbytes // itemsize(info.dtype) * itemsize(to)
        items[stored] = Item(stored, name, to, info.shape, nbytes)
    return tuple(items.values()), tied


def tree_of(checkpoint: Checkpoint, names: Sequence[str], *, whole: bool) -> Node:
    """The state tree: all of it, or with these leaves only."""
    if whole:
        return checkpoint._parts.tree
    return prune(localized(checkpoint._parts.tree, checkpoint._parts.local(0)), set(names))


def framework_of(job: Job, item: Item) -> Any:
    """The library whose arrays a leaf is."""
    return job.checkpoint._parts.leaf_infos[item.stored].framework


def advance(job: Job, done: int) -> Callable[[int], None]:
    """Progress of one file, behind `done` bytes of others."""
    total = job.nbytes
    return lambda nbytes: job.progress(min(done + nbytes, total), total)


def progress_of(job: Job, total: int | None = None) -> Callable[[int], None]:
    """Progress for a writer that tells how many bytes it has written since the last call."""
    done, everything = 0, job.nbytes if total is None else total

    def more(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        job.progress(min(done, everything), everything)

    return more
