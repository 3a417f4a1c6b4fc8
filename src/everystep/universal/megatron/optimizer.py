"""Megatron's optimizer state, which is kept by number: which parameter each number means.

Parameters are numbered group by group, in the order of the model. Megatron makes one group of all parameters,
or one of those with weight decay (matrices) and one of those without (biases and vectors). Shapes decide
which it is; if none fits, the layout is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.universal.torch_file.reading import StoredTensor

_MASTER = "fp32_from_fp16_params"
NAMES = "parameter_names"
"""In a group that Everystep wrote: the parameters, with the layers' numbers in the whole model."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    names: tuple[str, ...]
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RankOptimizer:
    """Of one rank, by parameter and kind of state: tensors, and numbers. ``fp32`` is the master copy."""

    tensors: Mapping[str, Mapping[str, StoredTensor]]
    values: Mapping[str, Mapping[str, object]]
    groups: tuple[OptimizerGroup, ...]


def read_optimizer(file: str, saved: object, parameters: Shapes) -> RankOptimizer | None:
    """The state in a rank's file, given its parameters in order; None if the file has none."""
    if not isinstance(saved, Mapping):
        return None
    inner = saved["optimizer"] if isinstance(saved.get("optimizer"), Mapping) else saved
    state, groups = inner.get("state"), inner.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        return None
    masters = saved.get(_MASTER)
    if not isinstance(masters, list) or not all(isinstance(master, list) for master in masters):
        masters = []
    tensors: dict[str, dict[str, StoredTensor]] = {}
    values: dict[str, dict[str, object]] = {}
    found: list[OptimizerGroup] = []
    for number, group in enumerate(groups):
        indices = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(indices, (list, tuple)) or not all(isinstance(index, int) for index in indices):
            return None
        master = masters[number] if number < len(masters) else []
        taken = {name for known in found for name in known.names}
        names = _given_names(file, group, parameters, len(indices))
        if names is None:
            names = _names(
                file,
                number,
                [_shape(state, index, master, at) for at, index in enumerate(indices)],
                {name: shape for name, shape in parameters.items() if name not in taken},
            )
        for at, (name, index) in enumerate(zip(names, indices, strict=True)):
            kept = dict(state[index]) if isinstance(state.get(index), Mapping) else {}
            if at < len(master):
                kept["fp32"] = master[at]
            for kind, value in kept.items():
                if isinstance(value, StoredTensor):
                    tensors.setdefault(name, {})[str(kind)] = value
                elif isinstance(value, (bool, int, float)):
                    values.setdefault(name, {})[str(kind)] = value
        options = {
            key: value for key, value in group.items() if key not in ("params", NAMES) and _is_plain(value)
        }
        found.append(OptimizerGroup(tuple(names), options))
    return RankOptimizer(tensors, values, tuple(found))


def _shape(state: Mapping[Any, Any], index: object, master: Sequence[Any], at: int) -> tuple[int, ...] | None:
    """The shape of a parameter, from its state; None if it has no state (never stepped)."""
    first = master[at] if at < len(master) else None
    if isinstance(first, StoredTensor):
        return first.shape
    kept = state.get(index)
    shapes = (
        [v.shape for v in kept.values() if isinstance(v, StoredTensor)] if isinstance(kept, Mapping) else []
    )
    return max(shapes, key=len, default=None)


def _given_names(file: str, group: Mapping[Any, Any], parameters: Shapes, number: int) -> list[str] | None:
    """The names that a group says, if it does."""
    given = group.get(NAMES)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != number or len(set(map(str, given))) != number:
        raise CorruptCheckpoint(f"{NAMES} does not fit the parameters of the group", path=file)
    unknown = [name for name in given if not isinstance(name, str) or name not in parameters]
    if unknown:
        raise CorruptCheckpoint(f"{NAMES} has {unknown[0]!r}, which the file does not", path=file)
    return given


def _is_plain(value: object) -> bool:
    """Numbers and text, and tuples of them such as Adam's betas."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, (bool, int, float, str)) for one in value)
    return isinstance(value, (bool, int, float, str))


def _names(file: str, number: int, shapes: list[tuple[int, ...] | None], parameters: Shapes) -> list[str]:
    plain = {name for name, shape in parameters.items() if name.endswith(".bias") or len(shape) <= 1}
    for names in (
        list(parameters),
        [name for name in parameters if name not in plain],
        [name for name in parameters if name in plain],
    ):
        if len(names) == len(shapes) and all(
            shape is None or shape == parameters[name] for name, shape in zip(names, shapes, strict=True)
        ):
            return names
    raise UnsupportedSource(
        f"{file}: the optimizer's group {number} has {len(shapes)} parameters whose shapes fit neither all "
        f"{len(parameters)} parameters, nor those with or without weight decay"
    )
