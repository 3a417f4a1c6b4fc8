"""Megatron-LM: a directory ``mp_rank_TT[_PPP]`` for each tensor- and pipeline-parallel rank.

Each holds ``model_optim_rng.pt`` (or ``model_rng.pt``). A pipeline stage numbers its layers from 0, so names
get the number of the layers before it. With interleaved stages a file has ``model0``, ``model1`` and so on;
the first of all stages come before the second. A spec says how tensor-parallel ranks
cut each parameter; without one, the preset ``megatron-gpt`` does, with the arguments in the files.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.universal.megatron.optimizer import RankOptimizer, read_optimizer
from everystep.universal.rules import Replicated, Rule
from everystep.universal.source import Source, SourceLeaf
from everystep.universal.spec import Assigned, Spec
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.leaves import lying_leaf
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file
from everystep.universal.training_state import TrainingState, plain
from everystep.universal.union import Holders, join, union

KIND = "megatron"
WANTED = "mp_rank_XX[_YYY]/model_optim_rng.pt, or latest_checkpointed_iteration.txt beside such directories"

_LATEST = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d+)(\..*)", re.DOTALL)
_MAX_DEPTH = 100
_CHUNK = re.compile(r"model(\d*)")
INERT = (
    "megatron.core.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.transformer.enums.ModelType",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.rerun_state_machine.RerunValidationStatus",
    "signal.Signals",
)
"""Classes of Megatron that its arguments mention. Their objects are read by name only and are not used."""


def looks_like(path: str) -> str | None:
    """The directories of ranks that were found."""
    try:
        found = _rank_files(checkpoint_directory(path))
    except UnsupportedSource:
        return "directories mp_rank_* with expert-parallel ranks"
    except (OSError, ValueError):
        return None
    return f"{len(found)} directories mp_rank_*" if found else None


def parameters(path: str) -> list[str]:
    """The names that a spec is asked for, in the order of the model."""
    return list(_read(path).tensors)


def describe(path: str, spec: Spec | None = None, as_training: bool | None = None) -> Source:
    """Where the parameters and the optimizer's state of a checkpoint lie."""
    found = _read(path)
    taken = (spec or found.preset()).assign(found.tensors)
    made = TrainingState(path)
    made.model = join(taken, found.tensors)
    optimizer = _join_optimizer(found, taken, made)
    first = found.ranks[0, 0].content
    made.rest["iteration"] = found.step
    version = first.get("checkpoint_version", 0)
    if isinstance(version, (int, float)):
        made.rest["checkpoint_version"] = version
    if found.args:
        made.rest["args"] = plain(found.args, found.ranks[0, 0].file)
    if first.get("opt_param_scheduler"):
        made.rest["opt_param_scheduler"] = plain(first["opt_param_scheduler"], found.ranks[0, 0].file)
    facts = {
        "tensor parallel": str(found.tp),
        "pipeline parallel": str(found.pp),
        "optimizer state": optimizer,
        "checkpoint version": str(first.get("checkpoint_version", 0)),
    }
    return source_of(path, KIND, made.tree(), step=found.step, facts=facts)


@dataclass(frozen=True, slots=True)
class _Rank:
    """The file of one rank. `chunks` are its parts of the model: local name -> tensor, in order."""

    file: str
    content: Mapping[str, Any]
    chunks: tuple[Mapping[str, StoredTensor], ...]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    tp: int
    pp: int
    step: int
    ranks: Mapping[tuple[int, int], _Rank]
    first_layers: Mapping[tuple[int, int], int]
    tensors: Mapping[str, Holders]

    @property
    def args(self) -> Mapping[str, Any]:
        return _args_of(self.ranks[0, 0])

    def preset(self) -> Spec:
        args = self.args
        vocabulary = args.get("vocab_size")
        version = self.ranks[0, 0].content.get("checkpoint_version", 0)
        return Spec.preset(
            "megatron-gpt",
            vocab_size=vocabulary if isinstance(vocabulary, int) else None,
            swiglu=bool(args.get("swiglu")),
            checkpoint_version=version if isinstance(version, (int, float)) else 0,
            tied_output=not args.get("untie_embeddings_and_output_weights", False),
        )


def checkpoint_directory(path: str) -> str:
    """The directory that holds those of the ranks."""
    latest = os.path.join(path, _LATEST)
    if not os.path.isfile(latest):
        return path
    with open(latest, encoding="utf-8", errors="replace") as file:
        text = file.read(64).strip()
    if text == "release":
        return os.path.join(path, text)
    if not text.isdecimal():
        raise CorruptCheckpoint(f"it has {text!r}, which is no iteration", path=latest)
    return os.path.join(path, f"iter_{int(text):07d}")


def _rank_files(directory: str) -> dict[tuple[int, int], str]:
    """The file of every rank, by tensor- and pipeline-parallel rank."""
    found: dict[tuple[int, int], str] = {}
    if not os.path.isdir(directory):
        return found
    for name in sorted(os.listdir(directory)):
        matched = _RANK.fullmatch(name)
        if matched is None:
            continue
        if matched[3]:
            raise UnsupportedSource(
                f"{directory}: {name}: expert-parallel ranks, or data-parallel ones of old versions, are not "
                "read. Megatron can save them with --ckpt-format torch_dist"
            )
        files = [os.path.join(directory, name, file) for file in _FILES]
        present = next((file for file in files if os.path.isfile(file)), files[0])
        found[int(matched[1]), int(matched[2] or 0)] = present
    return found if any(map(os.path.isfile, found.values())) else {}


def _read(path: str) -> _Checkpoint:
    directory = checkpoint_directory(path)
    files = _rank_files(directory)
    if not files:
        raise IncompleteCheckpoint("it has no directory mp_rank_* with a checkpoint", path=directory)
    tp, pp = (max(numbers) + 1 for numbers in zip(*files, strict=True))
    ranks: dict[tuple[int, int], _Rank] = {}
    for key in ((t, p) for p in range(pp) for t in range(tp)):
        if key not in files:
            name = f"mp_rank_{key[0]:02d}" + (f"_{key[1]:03d}" if pp > 1 else "")
            raise IncompleteCheckpoint("the file of this rank is missing", path=os.path.join(directory, name))
        ranks[key] = _read_rank(files[key])
    step = _common_step(ranks)
    _require_degrees(ranks[0, 0], tp, pp)
    first_layers = _first_layers(ranks, pp)
    return _Checkpoint(tp, pp, step, ranks, first_layers, _tensors(ranks, first_layers, tp))


def _read_rank(file: str) -> _Rank:
    content = read_torch_file(file, allowed=INERT)
    if not isinstance(content, Mapping):
        raise UnsupportedSource(f"{file}: a {type(content).__name__}, not the dictionary that Megatron saves")
    chunks: list[tuple[int, Any]] = []
    for key, value in content.items():
        matched = _CHUNK.fullmatch(key) if isinstance(key, str) else None
        if matched is not None and isinstance(value, Mapping):
            chunks.append((int(matched[1] or 0), value))
    if not chunks:
        raise UnsupportedSource(
            f"{file}: it has no 'model'; it has {', '.join(map(str, list(content)[:20]))}"
        )
    chunks.sort(key=lambda pair: pair[0])
    return _Rank(file, content, tuple(_flatten(file, value) for _, value in chunks))


def _flatten(file: str, tree: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """Nested dictionaries of older versions, by dotted names. State of transformer-engine is left out."""
    found: dict[str, StoredTensor] = {}
    waiting: list[tuple[str, object]] = [("", tree)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict) and value:
            if name.count(".") > _MAX_DEPTH or not all(isinstance(key, str) for key in value):
                raise UnsupportedSource(
                    f"{file}: {name[:80]!r} is no part of a model: its keys are not names, or objects are "
                    f"nested deeper than {_MAX_DEPTH}, or contain themselves"
                )
            below = [(f"{name}.{key}" if name else key, one) for key, one in value.items()]
            waiting.extend(reversed(below))
        elif name.endswith("_extra_state"):
            continue
        elif isinstance(value, StoredTensor):
            if name in found:
                raise UnsupportedSource(f"{file}: two tensors are both named {name!r}")
            found[name] = value
        elif value not in (None, {}):
            raise UnsupportedSource(f"{file}: {name!r} is a {type(value).__name__}, not a tensor")
    return found


def _common_step(ranks: Mapping[tuple[int, int], _Rank]) -> int:
    steps = {rank.file: rank.content.get("iteration", 0) for rank in ranks.values()}
    first = next(iter(steps.values()))
    for file, step in steps.items():
        if step != first:
            raise CorruptCheckpoint(f"it is of iteration {step}, but other ranks are of {first}", path=file)
    return first if isinstance(first, int) else 0


def _args_of(rank: _Rank) -> Mapping[str, Any]:
    """The arguments of Megatron's command line."""
    found = rank.content.get("args")
    return vars(found) if isinstance(found, argparse.Namespace) else {}


def _require_degrees(rank: _Rank, tp: int, pp: int) -> None:
    args = _args_of(rank)
    experts = args.get("expert_model_parallel_size")
    if isinstance(experts, int) and experts > 1:
        # Without pipeline parallelism, directories of expert-parallel ranks look like those of stages.
        raise UnsupportedSource(
            f"{rank.file}: expert_model_parallel_size is {experts}; expert-parallel ranks are not read. "
            "Megatron can save them with --ckpt-format torch_dist"
        )
    for name, found in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        said = args.get(name)
        if isinstance(said, int) and said != found:
            raise IncompleteCheckpoint(
                f"{name} is {said}, but there are directories for {found}", path=rank.file
            )


def _first_layers(ranks: Mapping[tuple[int, int], _Rank], pp: int) -> dict[tuple[int, int], int]:
    """The number of the first layer of each (chunk, stage)."""
    chunks = {len(ranks[0, stage].chunks) for stage in range(pp)}
    if len(chunks) > 1:
        raise CorruptCheckpoint("stages have different numbers of model chunks", path=ranks[0, 0].file)
    first: dict[tuple[int, int], int] = {}
    total = 0
    for chunk in range(chunks.pop()):
        for stage in range(pp):
            first[chunk, stage] = total
            rank = ranks[0, stage]
            matched = [_LAYER.fullmatch(name) for name in rank.chunks[chunk]]
            numbers = {int(found[2]) for found in matched if found is not None}
            if numbers != set(range(len(numbers))):
                raise UnsupportedSource(
                    f"{rank.file}: its layers are numbered {sorted(numbers)[:20]}, not from 0"
                )
            total += len(numbers)
    return first


def _global_name(name: str, first: int) -> str:
    matched = _LAYER.fullmatch(name)
    return name if matched is None else f"{matched[1]}{int(matched[2]) + first}{matched[3]}"


def _tensors(
    ranks: Mapping[tuple[int, int], _Rank], first_layers: Mapping[tuple[int, int], int], tp: int
) -> dict[str, list[list[SourceLeaf]]]:
    """Every parameter by its name in the whole model; stages that hold the same one hold copies."""
    found: dict[str, list[list[SourceLeaf]]] = {}
    for (chunk, stage), first in first_layers.items():
        leader = ranks[0, stage]
        for local in leader.chunks[chunk]:
            holders = found.setdefault(_global_name(local, first), [[] for _ in range(tp)])
            for number in range(tp):
                rank = ranks[number, stage]
                if local not in rank.chunks[chunk]:
                    raise CorruptCheckpoint(
                        f"it is missing; {leader.file} has it", path=rank.file, leaf=local
                    )
                holders[number].append(lying_leaf(local, rank.chunks[chunk][local]))
        for number in range(1, tp):
            rank = ranks[number, stage]
            extra = next((name for name in rank.chunks[chunk] if name not in leader.chunks[chunk]), None)
            if extra is not None:
                raise CorruptCheckpoint(f"{leader.file} does not have it", path=rank.file, leaf=extra)
    return found


def _join_optimizer(
    found: _Checkpoint,
    taken: tuple[Assigned, ...],
    made: TrainingState,
) -> str:
    """Adds what the optimizer holds of each parameter; says what was found."""
    states: dict[tuple[int, int], RankOptimizer] = {}
    for (tensor, stage), rank in found.ranks.items():
        names = {
            _global_name(name, found.first_layers[chunk, stage]): stored.shape
            for chunk, held in enumerate(rank.chunks)
            for name, stored in held.items()
        }
        state = read_optimizer(rank.file, rank.content.get("optimizer"), names)
        if state is None:
            beside = os.path.join(os.path.dirname(rank.file), "distrib_optim.pt")
            if os.path.exists(beside):
                return "of a distributed optimizer (distrib_optim.pt), not read"
            return "of a form that is not known, not read" if rank.content.get("optimizer") else "none"
        states[tensor, stage] = state
    trained = {assigned.new_name for assigned in taken if assigned.tied_to is None}
    kinds = sorted({kind for state in states.values() for held in state.tensors.values() for kind in held})
    for kind in kinds:
        held: dict[str, list[list[SourceLeaf]]] = {}
        for (tensor, _), state in states.items():
            for name, kept in state.tensors.items():
                if kind in kept:
                    held.setdefault(name, [[] for _ in range(found.tp)])[tensor].append(
                        lying_leaf(name, kept[kind])
                    )
        alike = {
            name: holders
            for name, holders in held.items()
            if _shapes(holders) == _shapes(found.tensors[name])
        }
        for name, leaf in join(taken, alike, "optimizer.", f".{kind}").items():
            if name in trained:
                made.states.setdefault(name, {})[kind] = leaf
        for assigned in taken:
            name = assigned.name
            if name in held and name not in alike and assigned.tied_to is None:
                # A step count, for example, is not cut as its parameter is: every rank has the same.
                same = Rule(assigned.rule.match, Replicated())
                place = f"optimizer.{assigned.new_name}.{kind}"
                made.states.setdefault(assigned.new_name, {})[kind] = union(
                    name, same, held[name], leaf=place
                )
    new_names = {assigned.name: assigned.new_name for assigned in taken if assigned.tied_to is None}
    for state in states.values():
        for name, numbers in state.values.items():
            for kind, value in numbers.items():
                if name in new_names:
                    made.states.setdefault(new_names[name], {})[kind] = value
    groups: list[dict[str, object]] = []
    for stage in range(found.pp):
        for number, group in enumerate(states[0, stage].groups):
            if number == len(groups):
                groups.append({**group.options, "params": []})
            params = groups[number]["params"]
            assert isinstance(params, list)
            params.extend(new_names[name] for name in group.names if name in new_names)
    made.groups = groups
    return ", ".join(kinds) or "none"


def _shapes(holders: Holders) -> list[list[tuple[int, ...]]]:
    return [[held.shape for held in copies] for copies in holders]
