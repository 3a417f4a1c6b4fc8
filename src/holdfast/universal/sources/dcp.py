"""Directories of `torch.distributed.checkpoint`: ``.metadata`` and ``__R_N.distcp`` files.

Names stay as they are in the state dict, except those that torch's ``get_state_dict`` gives to an optimizer:
``optimizer.state.<parameter>.<state>`` becomes ``optimizer.<parameter>.<state>``, and the options of its
groups, which DCP stores one by one, become ``optimizer.param_groups`` again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import UnsupportedSource
from holdfast.universal.dcp_directory import METADATA, DcpDirectory
from holdfast.universal.source import Source, SourceLeaf
from holdfast.universal.trees import Collected, step_of

KIND = "dcp"
WANTED = "a directory with .metadata and *.distcp"
_STEP_WORDS = ("global_step", "step", "iteration", "train_state.step")
_STATE = (("optimizer.state.", "optimizer."), ("optim.state.", "optim."))
_GROUPS = "optimizer.param_groups"


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found, or None if this is nothing that `describe` reads."""
    if os.path.isfile(os.path.join(path, METADATA)):
        return f"a directory of torch.distributed.checkpoint ({METADATA})"
    return None


def describe(path: str | os.PathLike[str], spec: object = None) -> Source:
    """The leaves and values of a DCP directory."""
    directory = DcpDirectory(os.path.abspath(path))
    into = Collected(directory.path)
    leaves: list[SourceLeaf] = []
    options: dict[str, Any] = {}
    for name in directory.tensors:
        if _is_option(name):
            options[name] = directory.read_number(name)
        else:
            leaves.append(directory.leaf(name, _our_name(name)))
    lists = _Lists(directory)
    for name in directory.objects:
        if _is_option(name):
            options[name] = into.plain(directory.read_object(name))
        elif lists.has(name):
            lists.put(name, into.plain(directory.read_object(name)))
        else:
            into.add(directory.read_object(name), _our_name(name))
    for name, made in lists.values():
        into.add_value(name, made)
    if options:
        into.add_value(_GROUPS, _groups(directory, options))
    others, same = into.leaves()
    kept, aliases = _tied([*leaves, *others])
    names = [leaf.name for leaf in kept]
    aliases.update(same)
    if len({*names, *aliases}) != len(names) + len(aliases):
        raise UnsupportedSource(f"{directory.path}: two entries have one name")
    facts = {"format": "torch.distributed.checkpoint"}
    if directory.version is not None:
        facts["version"] = directory.version
    return Source(
        path=directory.path,
        kind=KIND,
        step=step_of(into.values, _STEP_WORDS),
        leaves=tuple(kept),
        values=into.values,
        aliases=aliases,
        facts=facts,
    )


def _our_name(name: str) -> str:
    for old, new in _STATE:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _is_option(name: str) -> bool:
    return name.startswith(f"{_GROUPS}.")


class _Lists:
    """Values inside of lists, which DCP takes apart if a list has dictionaries in it.

    They are put together again, unless there are tensors in the list: these are leaves.
    """

    def __init__(self, directory: DcpDirectory) -> None:
        self._paths = directory.paths
        self._with_tensors = {self._root(name) for name in directory.tensors}
        self._made: dict[tuple[str | int, ...], dict[str | int, Any]] = {}

    def _root(self, name: str) -> tuple[str | int, ...]:
        """The path of the list that an entry is in; empty if it is in none."""
        path = self._paths.get(name, ())
        first = next((at for at, key in enumerate(path) if type(key) is int), 0)
        return path[:first]

    def has(self, name: str) -> bool:
        root = self._root(name)
        return bool(root) and root not in self._with_tensors

    def put(self, name: str, value: object) -> None:
        root = self._root(name)
        below = self._made.setdefault(root, {})
        *containers, last = self._paths[name][len(root) :]
        for key in containers:
            below = below.setdefault(key, {})
        below[last] = value

    def values(self) -> Iterator[tuple[str, object]]:
        for root, made in self._made.items():
            yield ".".join(map(str, root)), _with_lists(made)


def _with_lists(made: Any) -> Any:
    """Dictionaries whose keys are numbers are lists. An element that was not saved is None."""
    if not isinstance(made, dict):
        return made
    items = {key: _with_lists(value) for key, value in made.items()}
    if not items or not all(type(key) is int for key in items) or max(items) > 2 * len(items) + 1000:
        return items
    return [items.get(number) for number in range(max(items) + 1)]


def _groups(directory: DcpDirectory, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of an optimizer, whose options are entries of their own.

    Named by the group's number and the option, or, if the state dict was flattened
    (``flatten_optimizer_state_dict``), by the parameter and the option: then parameters with equal options
    make a group.
    """
    paths = directory.paths
    groups: dict[object, dict[str, Any]] = {}
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        below, _, option = name.removeprefix(f"{_GROUPS}.").rpartition(".")
        number = _group_number(paths.get(name), below, f"{_GROUPS}.{below}.params" in options)
        if number is not None:
            groups.setdefault(number, {})[option] = value
        else:
            by_parameter.setdefault(below, {})[option] = value
    for parameter, held in by_parameter.items():
        group = groups.setdefault(repr(sorted(held.items())), {**held, "params": []})
        group["params"].append(parameter)
    return list(groups.values())


def _group_number(path: tuple[str | int, ...] | None, below: str, counted: bool) -> int | None:
    """The number of the group that an option belongs to; None if it belongs to a parameter."""
    if path is not None:
        return path[2] if len(path) == 4 and type(path[2]) is int else None
    return int(below) if counted and below.isdecimal() else None


def _tied(leaves: list[SourceLeaf]) -> tuple[list[SourceLeaf], dict[str, str]]:
    """Leaves that lie in the same place are one, with several names."""
    seen: dict[object, str] = {}
    kept: list[SourceLeaf] = []
    aliases: dict[str, str] = {}
    for leaf in leaves:
        first = seen.setdefault((leaf.dtype, leaf.shape, leaf.stretches), leaf.name)
        if first != leaf.name and leaf.stretches:
            aliases[leaf.name] = first
        else:
            kept.append(leaf)
    return kept, aliases
