"""Directories of `torch.distributed.checkpoint`: ``.metadata`` and ``__R_N.distcp`` files.

A directory gives the nested state that was saved, as `dcp_to_torch_save` of torch restores it. Arranged as a
training state, the optimizer's state is by parameter also where ``flatten_optimizer_state_dict`` has made one
level of it, and ``optim`` is called ``optimizer``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.universal.dcp.directory import METADATA, DcpDirectory
from everystep.universal.optimizer_names import is_named, is_optimizer_state
from everystep.universal.source import Source, SourceLeaf
from everystep.universal.state_tree import OptimizerState, source_of, step_in
from everystep.universal.training_state import longest_first

KIND = "dcp"
WANTED = "a directory with .metadata and *.distcp"
_STEPS = (("global_step",), ("step",), ("iteration",), ("train_state", "step"))
_STATE, _GROUPS = "state.", "param_groups."
_MAX_GAP = 1000
"""A damaged index of a list must not make millions of elements."""


Place = tuple[str | int, ...]


class _Missing:
    """Stands for an element of a list until its entry comes."""


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found there, for messages; None if `describe` does not read it."""
    if os.path.isfile(os.path.join(path, METADATA)):
        return f"a directory of torch.distributed.checkpoint ({METADATA})"
    return None


def describe(path: str | os.PathLike[str], spec: object = None, as_training: bool | None = None) -> Source:
    """The state in a DCP directory."""
    directory = DcpDirectory(os.path.abspath(path))
    facts = {"written by": "torch.distributed.checkpoint"}
    if directory.version is not None:
        facts["version"] = directory.version
    state = _nested(directory)
    return source_of(
        directory.path,
        KIND,
        _training_state(state) if as_training else state,
        step=step_in(state, *_STEPS),
        facts=facts,
        arranged=bool(as_training),
    )


def _nested(directory: DcpDirectory) -> dict[str, Any]:
    """Every entry at the place that the planner recorded for it; without one, under its name."""
    paths = directory.paths
    tensors = set(directory.tensors)
    tied: dict[object, SourceLeaf] = {}  # writers may store what is tied once, and name it twice
    state: dict[str, Any] = {}
    lists: list[tuple[Place, list[Any]]] = []
    for name in directory.names:
        if name in tensors:
            leaf = directory.leaf(name, name)
            value = tied.setdefault((leaf.dtype, leaf.shape, leaf.fragments or name), leaf)
        else:
            value = directory.read_object(name)
        place = paths.get(name, (name,))
        try:
            _put(state, place, value, lists)
        except (TypeError, IndexError):
            raise CorruptCheckpoint(
                f"its place in the state, {'.'.join(map(str, place))}, does not fit the others",
                path=directory.metadata_path,
                leaf=name,
            ) from None
    _require_whole(directory, lists)
    return {key: _by_parameter(value) for key, value in state.items()}


def _require_whole(directory: DcpDirectory, lists: list[tuple[Place, list[Any]]]) -> None:
    """DCP saves nothing of an empty dict, and then cannot load the list that it was in, either."""
    for place, made in lists:
        missing = next((number for number, one in enumerate(made) if one is _Missing), None)
        if missing is not None:
            at = ".".join(map(str, (*place, missing)))
            raise UnsupportedSource(
                f"{directory.path}: DCP has not saved {at!r}, as a rule an empty dict. So the list cannot be "
                "read as it was; torch can only load it into a state that has the list already"
            )


def _by_parameter(value: Any) -> Any:
    """Marks an optimizer's state by names, so that its leaves get the names that a live optimizer's get."""
    named = is_optimizer_state(value) and is_named(value)
    return OptimizerState(value) if named else value


def _put(state: dict[str, Any], place: Place, value: object, lists: list[tuple[Place, list[Any]]]) -> None:
    """Puts a value into nested dicts and lists, and makes these as needed; adds new lists to `lists`."""
    container: Any = state
    key: Any
    for number, (key, below) in enumerate(zip(place, (*place[1:], None), strict=True), 1):
        if isinstance(container, list):
            if type(key) is not int or not 0 <= key <= len(container) + _MAX_GAP:
                raise IndexError(key)
            container.extend([_Missing] * (key + 1 - len(container)))
        elif not isinstance(container, dict):
            raise TypeError(key)
        if below is None:
            container[key] = value
            return
        found = container[key] if isinstance(container, list) else container.get(key, _Missing)
        if found is _Missing:
            found = container[key] = [] if type(below) is int else {}
            if isinstance(found, list):
                lists.append((place[:number], found))
        container = found


def _training_state(state: Mapping[str, Any]) -> dict[str, Any]:
    arranged: dict[str, Any] = {}
    model = state.get("model")
    for key, value in state.items():
        if key == "optim" and "optimizer" not in state:
            key = "optimizer"
        if key == "optimizer" and _is_flattened(value):
            value = _unflattened(value, model if isinstance(model, dict) else {})
        arranged[key] = value
    return arranged


def _is_flattened(optimizer: object) -> bool:
    return isinstance(optimizer, dict) and any(
        isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in optimizer
    )


def _unflattened(optimizer: Mapping[Any, Any], model: Mapping[Any, Any]) -> OptimizerState:
    """The state of an optimizer of which ``flatten_optimizer_state_dict`` has made one level.

    Entries are ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<option>``.
    A parameter's name ends where one of the model does; without the model, before the last dot. Parameters
    with equal options make a group.
    """
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for key, value in optimizer.items():
        into = next(
            (one for begin, one in ((_STATE, states), (_GROUPS, options)) if str(key).startswith(begin)), None
        )
        if into is None:
            rest[key] = value
            continue
        name = key.partition(".")[2]
        beginnings = list(longest_first(name))
        parameter = next((one for one in beginnings if one in model), beginnings[0] if beginnings else name)
        into.setdefault(parameter, {})[name[len(parameter) + 1 :]] = value
    groups: dict[str, dict[str, Any]] = {}
    for parameter, held in options.items():
        held.pop("params", None)
        group = groups.setdefault(repr(sorted(held.items())), {**held, "params": []})
        group["params"].append(parameter)
    return OptimizerState({"state": states, "param_groups": list(groups.values()), **rest})
