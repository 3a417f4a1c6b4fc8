"""What the optimizer files of data-parallel ranks hold of each parameter, in ZeRO-1, 2 and 3.

ZeRO-1 and 2 lay the parameters of a group end to end, pad the result and cut it equally;
``param_slice_mappings`` in each rank's file says which piece of which parameter lies where. ZeRO-3 cuts each
parameter into equal pieces (the last one padded) and lays a rank's pieces end to end, one flat vector for
each sub-group. The group of a mixture of experts is cut over those ranks only that hold the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.universal.deepspeed.experts import Experts
from everystep.universal.deepspeed.files import Folder, Shape, content_of, param_shapes, partition
from everystep.universal.deepspeed.names import FLAT_MASTERS, FP32, OPTIMIZER_DICT, STAGE
from everystep.universal.source import SourceFragment, SourceLeaf, flat_fragments
from everystep.universal.torch_file.pickle_machine import InertObject
from everystep.universal.torch_file.reading import StoredTensor


@dataclass(slots=True)
class ParameterState:
    """What the optimizer keeps of one parameter: arrays of its shape, and numbers (the step)."""

    tensors: dict[str, SourceLeaf] = field(default_factory=dict)
    numbers: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """A group of the optimizer: its options, and its parameters in order."""

    options: Mapping[str, Any]
    names: Sequence[str]


@dataclass(slots=True)
class RankOptimizer:
    """Of one model-parallel rank: by parameter name, whole over data-parallel ranks.

    `content` has the other entries of the first rank's file. `counted` is the state dict of an optimizer that
    counts its parameters, if nothing tells which is which.
    """

    stage: int
    states: dict[str, ParameterState] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    groups: list[OptimizerGroup] = field(default_factory=list)
    content: Mapping[str, Any] = field(default_factory=dict)
    expert_degree: int = 1
    counted: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _RankFile:
    """What one rank's file holds, in one form for all stages: a list by group."""

    path: str
    masters: Sequence[StoredTensor]
    states: Sequence[Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _VectorRange:
    """Elements `start` to `stop` of a parameter lie in the flat vectors of a rank from element `first` on."""

    rank: int
    first: int
    start: int
    stop: int


def read_zero(folder: Folder, mp: int) -> RankOptimizer:
    """The state of one model-parallel rank."""
    flats = [_read_flat(folder, folder.files.optimizers[mp, dp]) for dp in range(folder.degrees.data)]
    stage = _stage(folder, flats)
    shapes = param_shapes(folder.model_file(mp), folder.model(mp))
    for flat in flats:
        if len(flat.masters) != len(shapes):
            raise CorruptCheckpoint(
                f"{len(flat.masters)} groups of weights, but the model file has {len(shapes)}", path=flat.path
            )
    made = RankOptimizer(stage, content=flats[0].content)
    experts = Experts.of(folder, shapes)
    every: list[str] = []
    for group, named in enumerate(shapes):
        listed: list[str] = []
        for members, expert_rank in _members(flats, group, named, experts):
            names = {name: experts.global_name(name, expert_rank) for name in named}
            pieces = _pieces(folder, stage, flats, members, group, named)
            _add_states(made, folder, flats, members, group, named, names, pieces)
            made.expert_degree = max(made.expert_degree, len(flats) // len(members))
            listed += names.values()
        # ZeRO-3 counts sub-groups, which are no groups of the optimizer.
        if stage != 3 and len(flats[0].groups) == len(shapes):
            made.groups.append(OptimizerGroup(flats[0].groups[group], listed))
        every += listed
    if not made.groups:
        # The files of ZeRO-3 do not say which of several groups a parameter is in.
        alone = every if len(flats[0].groups) == 1 else ()
        made.groups = [OptimizerGroup(options, alone) for options in flats[0].groups]
    return made


# --- the files


def _read_flat(folder: Folder, path: str) -> _RankFile:
    inner = folder.read(path).get(OPTIMIZER_DICT)
    if not isinstance(inner, dict):
        raise UnsupportedSource(f"{path}: there is no 'optimizer_state_dict'")
    if FLAT_MASTERS in inner:
        masters, base = inner[FLAT_MASTERS], inner.get(OPTIMIZER_DICT)
    else:
        masters, base = inner.get("single_partition_of_fp32_groups"), inner.get("base_optimizer_state")
    if not isinstance(masters, list) or not all(isinstance(one, StoredTensor) for one in masters):
        raise UnsupportedSource(f"{path}: the FP32 weights are in a form that is not known")
    states, groups = _states(path, base, len(masters))
    return _RankFile(path, masters, states, groups, inner)


def _states(path: str, base: object, count: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The optimizer's states by group, and its param_groups."""
    groups: object = []
    if isinstance(base, dict):
        found, groups = base.get("state"), base.get("param_groups")
        if isinstance(found, dict):
            states = [found.get(index, {}) for index in range(count)]
            if not set(found) <= set(range(count)):
                raise UnsupportedSource(f"{path}: the optimizer counts more groups than there are weights")
        else:
            states = [None] * count
    elif isinstance(base, list):  # elastic_checkpoint
        states = list(base)
    else:
        states = [None] * count
    if len(states) != count or not all(isinstance(one, dict) for one in states):
        raise UnsupportedSource(f"{path}: the optimizer's state is in a form that is not known")
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        raise UnsupportedSource(f"{path}: the optimizer's param_groups are in a form that is not known")
    return states, groups


def _stage(folder: Folder, flats: Sequence[_RankFile]) -> int:
    stages: set[int] = set()
    for flat in flats:
        stage = flat.content.get("zero_stage", 1)  # BF16_Optimizer, which works as stage 1, does not say
        if isinstance(stage, InertObject) and stage.name == STAGE and len(stage.args) == 1:
            stage = stage.args[0]
        if type(stage) is not int or not 1 <= stage <= 3:
            raise UnsupportedSource(f"{flat.path}: ZeRO stage {stage!r} is not known")
        if (stage == 3) != (FLAT_MASTERS in flat.content):
            raise UnsupportedSource(f"{flat.path}: the weights are not laid out as ZeRO stage {stage} does")
        stages.add(stage)
    if len(stages) != 1:
        raise CorruptCheckpoint(f"the files of ranks have ZeRO stages {sorted(stages)}", path=folder.path)
    return stages.pop()


# --- where the pieces of a parameter lie


def _members(
    flats: Sequence[_RankFile], group: int, named: Mapping[str, Shape], experts: Experts
) -> list[tuple[Sequence[int], int]]:
    """The data-parallel ranks that share a group, and the expert-parallel rank whose experts it holds."""
    counts = flats[0].content.get("partition_count")
    count = counts[group] if isinstance(counts, list) and group < len(counts) else len(flats)
    if count == len(flats):
        return [(range(len(flats)), 0)]
    if type(count) is not int or count < 1 or len(flats) % count or not all(map(experts.is_expert, named)):
        raise UnsupportedSource(
            f"{flats[0].path}: group {group} is cut into {count!r} parts by {len(flats)} ranks, which is "
            "known only of experts"
        )
    return experts.members(len(flats), len(flats) // count)


def _pieces(
    folder: Folder,
    stage: int,
    flats: Sequence[_RankFile],
    members: Sequence[int],
    group: int,
    named: Mapping[str, Shape],
) -> dict[str, list[_VectorRange]]:
    if stage == 3:
        return _whole_pieces(members, named)
    found = _cut_pieces(folder, flats, members, group, named)
    return found if _in_order(found, named) else _walked_pieces(flats, members, group, named)


def _cut_pieces(
    folder: Folder, flats: Sequence[_RankFile], members: Sequence[int], group: int, named: Mapping[str, Shape]
) -> dict[str, list[_VectorRange]]:
    """ZeRO-1 and 2: what each rank's slice mappings say, in the order of ranks."""
    found: dict[str, list[_VectorRange]] = {name: [] for name in named}
    done = dict.fromkeys(found, 0)
    for rank in members:
        flat = flats[rank]
        mappings = flat.content.get("param_slice_mappings")
        if not isinstance(mappings, list) or len(mappings) != len(flat.masters):
            raise UnsupportedSource(f"{flat.path}: 'param_slice_mappings' is missing; DeepSpeed is too old")
        if not isinstance(mappings[group], dict):
            raise UnsupportedSource(f"{flat.path}: 'param_slice_mappings' is in a form that is not known")
        for name, address in mappings[group].items():
            if name not in found:
                raise CorruptCheckpoint(
                    "the model file does not have this parameter", path=flat.path, leaf=str(name)
                )
            known = address.attributes if isinstance(address, InertObject) else {}
            count, first = known.get("numel"), known.get("start")
            if type(count) is not int or type(first) is not int or count < 0 or first < 0:
                raise CorruptCheckpoint("the place of a piece is damaged", path=flat.path, leaf=name)
            start = done[name]
            done[name] += count
            found[name].append(_VectorRange(rank, first, start, start + count))
    for name, shape in named.items():
        if done[name] != math.prod(shape):
            raise CorruptCheckpoint(
                f"all ranks hold {done[name]} elements, but the parameter has {math.prod(shape)}: "
                "a file is of another checkpoint",
                path=folder.path,
                leaf=name,
            )
    return found


def _in_order(pieces: Mapping[str, list[_VectorRange]], named: Mapping[str, Shape]) -> bool:
    """Whether the slice mappings have the parameters in the order in which the model file lists them.

    With ``round_robin_gradients`` DeepSpeed (0.19.8) makes the mappings in the order of the model, but lays
    the parameters out in that of the model file: then the mappings, and what `ds_to_universal` makes of
    them, are wrong.
    """
    places = [(pieces[name][0].rank, pieces[name][0].first) for name in named if pieces[name]]
    return places == sorted(places)


def _walked_pieces(
    flats: Sequence[_RankFile], members: Sequence[int], group: int, named: Mapping[str, Shape]
) -> dict[str, list[_VectorRange]]:
    """ZeRO-1 and 2, from the order of parameters: end to end, cut into parts as long as the first."""
    paddings = flats[members[0]].content.get("param_alignment_paddings")
    after = paddings[group] if isinstance(paddings, list) and group < len(paddings) else [0] * len(named)
    length = max(1, flats[members[0]].masters[group].count)
    found: dict[str, list[_VectorRange]] = {}
    begin = 0
    for (name, shape), padding in zip(named.items(), after, strict=True):
        end = begin + math.prod(shape)
        found[name] = [
            _VectorRange(members[number], max(begin - number * length, 0), low - begin, high - begin)
            for number in range(begin // length, min(-(-end // length), len(members)))
            if (low := max(begin, number * length)) < (high := min(end, (number + 1) * length))
        ]
        begin = end + padding
    return found


def _whole_pieces(members: Sequence[int], named: Mapping[str, Shape]) -> dict[str, list[_VectorRange]]:
    """ZeRO-3: each parameter takes the same number of elements on every rank, the last ones padded."""
    found: dict[str, list[_VectorRange]] = {}
    first = 0
    for name, shape in named.items():
        count = math.prod(shape)
        cuts = [partition(count, len(members), number) for number in range(len(members))]
        found[name] = [
            _VectorRange(rank, first, start, stop)
            for rank, (start, stop) in zip(members, cuts, strict=True)
            if start < stop
        ]
        first += -(-count // len(members))
    return found


# --- the states of parameters


def _add_states(
    made: RankOptimizer,
    folder: Folder,
    flats: Sequence[_RankFile],
    members: Sequence[int],
    group: int,
    named: Mapping[str, Shape],
    names: Mapping[str, str],
    pieces: Mapping[str, list[_VectorRange]],
) -> None:
    vectors: dict[str, dict[int, Any]] = {FP32: {rank: flats[rank].masters[group] for rank in members}}
    shared = ParameterState()
    keys = {key: None for rank in members for key in flats[rank].states[group]}
    for key in keys:
        entries = {rank: flats[rank].states[group].get(key) for rank in members}
        first = entries[members[0]]
        if isinstance(first, StoredTensor) and _is_vector(first, vectors[FP32][members[0]]):
            vectors[key] = entries
        elif isinstance(first, StoredTensor):
            _require_equal(folder, flats, entries, key, next(iter(names.values()), ""))
            shared.numbers[key] = first
        else:
            if any(entry != first for entry in entries.values()):
                raise CorruptCheckpoint(
                    f"ranks disagree about {key!r}: files of two steps are mixed",
                    path=folder.path,
                    leaf=next(iter(names.values()), None),
                )
            shared.values[key] = first
    for name, shape in named.items():
        state = ParameterState(numbers=shared.numbers, values=shared.values)
        for key, entries in vectors.items():
            state.tensors[key] = _leaf(folder, flats, key, name, shape, entries, pieces[name])
        made.states[names[name]] = state
        made.shapes[names[name]] = shape


def _leaf(
    folder: Folder,
    flats: Sequence[_RankFile],
    key: str,
    parameter: str,
    shape: Shape,
    vectors: Mapping[int, Any],
    pieces: Sequence[_VectorRange],
) -> SourceLeaf:
    """A tensor of pieces of the flat vectors of ranks."""
    fragments: list[SourceFragment] = []
    kinds: set[str] = set()
    for piece in pieces:
        vector, path = vectors[piece.rank], flats[piece.rank].path
        if not isinstance(vector, StoredTensor):
            raise CorruptCheckpoint(f"{key!r} is missing in the file of this rank", path=path, leaf=parameter)
        if len(vector.shape) != 1 or not vector.contiguous:
            raise UnsupportedSource(
                f"{path}: {key!r} of {parameter!r} is not a flat vector but has shape {vector.shape}"
            )
        end = piece.first + piece.stop - piece.start
        if end > vector.count:
            raise CorruptCheckpoint(
                f"elements up to {end} are needed of a flat vector with {vector.count}",
                path=path,
                leaf=parameter,
            )
        kinds.add(vector.dtype)
        offset = vector.offset + piece.first * vector.itemsize
        fragments += flat_fragments(vector.file, offset, piece.start, piece.stop, shape, vector.itemsize)
    if len(kinds) > 1:
        raise CorruptCheckpoint(
            f"ranks have {key!r} in types {sorted(kinds)}", path=folder.path, leaf=parameter
        )
    return SourceLeaf(parameter, kinds.pop() if kinds else "F32", shape, tuple(fragments))


def _is_vector(entry: StoredTensor, master: StoredTensor) -> bool:
    """Whether a state has an element for each of a group's, and not one number for the whole group."""
    return bool(entry.shape) and (entry.count > 1 or master.count <= 1)


def _require_equal(
    folder: Folder, flats: Sequence[_RankFile], entries: Mapping[int, Any], key: str, parameter: str
) -> None:
    """Numbers that every rank keeps for itself, such as the step, are the same on all."""
    contents: set[bytes] = set()
    for rank, entry in entries.items():
        if not isinstance(entry, StoredTensor):
            raise CorruptCheckpoint(
                f"{key!r} is missing in the file of this rank", path=flats[rank].path, leaf=parameter
            )
        contents.add(content_of(entry))
    if len(contents) != 1:
        raise CorruptCheckpoint(
            f"ranks disagree about {key!r}: files of two steps are mixed", path=folder.path, leaf=parameter
        )
