"""DeepSpeed's universal layout, as its converter ``ds_to_universal`` writes it, and as we do.

- ``zero/<parameter>/{fp32,exp_avg,...}.pt``: whole parameters. Made from ZeRO-1 and 2, each file is a dict
  (``param`` and how tensor-parallel ranks cut it); made from ZeRO-3 it is a bare flat vector, whose shape is
  in the model's file. ``step.pt`` is a number.
- ``zero/optimizer_state.pt``: what belongs to no parameter.
- ``[zero_pp_rank_0_]mp_rank_XX_model_states.pt``: the model as it was trained, counters, scheduler, the
  client's own entries. Of ZeRO-3, the weights in it are empty: the FP32 ones are all there are.
- ``latest_universal``, in the directory above or in this one: the name of the directory.

Names of leaves and values are those of `everystep.universal.deepspeed.source`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.universal.deepspeed.files import (
    Shape,
    add_values,
    frozen_leaf,
    param_shapes,
    require_one_step,
    tag_folder,
)
from everystep.universal.deepspeed.names import (
    BUFFERS,
    CLASSES,
    DATA_RANKS,
    DEGREES,
    FLAT_MASTERS,
    FP32,
    FROZEN_SHAPES,
    INFO,
    LATEST,
    LATEST_UNIVERSAL,
    MODEL_FILE,
    MODULE,
    OPTIMIZER_DICT,
    OPTIMIZER_STATE,
    PARAM_SHAPES,
    SHARED,
    STEP,
    STEPS,
    SUBPARAM_SHAPE,
    VERSION,
    WANTED_UNIVERSAL,
    ZERO,
)
from everystep.universal.deepspeed.parameter_fields import PARAM, rule_of_fields
from everystep.universal.presets import deepspeed_rules
from everystep.universal.rules import Rule, replicated, rule
from everystep.universal.source import Source, SourceLeaf, flat_fragments
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.leaves import leaf_of, lying_leaf
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file
from everystep.universal.torch_file.torch_values import is_shape
from everystep.universal.training_state import TrainingState, plain
from everystep.universal.union import Holders, union

KIND = "ds-universal"
WANTED = WANTED_UNIVERSAL
_MAX_DEGREE = 1 << 16
_CLASSES = CLASSES | {SUBPARAM_SHAPE}


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found there, for messages; None if `describe` does not read it."""
    where = os.path.abspath(path)
    try:
        if os.path.exists(os.path.join(where, LATEST)):
            return None  # a run of DeepSpeed: its newest tag takes precedence
        folder = tag_folder(where, LATEST_UNIVERSAL)
    except (OSError, CorruptCheckpoint):
        return None
    if os.path.isfile(os.path.join(folder, ZERO, OPTIMIZER_STATE)):
        return "DeepSpeed's universal layout"
    return None


def describe(path: str | os.PathLike[str], spec: object = None, as_training: bool | None = None) -> Source:
    """The leaves and values of a universal checkpoint: its directory, or that with ``latest_universal``."""
    return _Checkpoint(os.path.abspath(path)).source()


class _Checkpoint:
    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = tag_folder(path, LATEST_UNIVERSAL)
        self._zero = os.path.join(self._folder, ZERO)
        self._pieces: dict[int, str] = {}  # by data-parallel rank: files with pieces of frozen parameters
        self._models = self._read_models()
        self._model = self._models[0][1]
        self._tp, self._pp = self._degrees()
        require_one_step(self._folder, (content for _, content in self._models))
        self._common = self._read(os.path.join(self._zero, OPTIMIZER_STATE))
        if not isinstance(self._common, dict):
            raise UnsupportedSource(f"{self._zero}/{OPTIMIZER_STATE}: this is not a dict of optimizer state")
        self._shapes = self._find_shapes()

    # --- the files

    def _read(self, path: str) -> Any:
        return read_torch_file(path, _CLASSES)

    def _read_models(self) -> list[tuple[str, dict[str, Any]]]:
        """The model's files, by model-parallel rank."""
        files: dict[int | None, dict[int, str]] = {}  # by data-parallel rank, if a name has it
        for name in sorted(os.listdir(self._folder)):
            if match := MODEL_FILE.fullmatch(name):
                rank = None if match[1] is None else int(match[1])
                files.setdefault(rank, {})[int(match[2])] = os.path.join(self._folder, name)
        if not files:
            raise IncompleteCheckpoint("there is no *_model_states.pt file", path=self._folder)
        partitioned = {rank: paths for rank, paths in files.items() if rank is not None}
        found = files[None] if None in files else partitioned[min(partitioned)]
        if set(found) != set(range(len(found))):
            missing = min(set(range(max(found))) - set(found))
            raise IncompleteCheckpoint(f"the model file of rank {missing} is missing", path=self._folder)
        if None not in files:
            self._pieces = {rank: paths[0] for rank, paths in partitioned.items() if 0 in paths}
        read = [(found[rank], self._read(found[rank])) for rank in sorted(found)]
        for where, content in read:
            if not isinstance(content, dict) or PARAM_SHAPES not in content:
                raise UnsupportedSource(f"{where}: there is no {PARAM_SHAPES!r}; this is not a model file")
        return read

    def _degrees(self) -> tuple[int, int]:
        """How many tensor-parallel ranks and pipeline stages wrote the model's files."""
        known = self._model.get(DEGREES)
        count = len(self._models)
        tp, pp = count, 1
        if isinstance(known, dict):
            tp, pp = known.get("tp_degree", count), known.get("pp_degree", 1)
        if type(tp) is not int or type(pp) is not int or not 0 < tp < _MAX_DEGREE or not 0 < pp < _MAX_DEGREE:
            raise CorruptCheckpoint(f"parallel degrees {tp!r} and {pp!r}", path=self._models[0][0])
        if tp * pp != count:
            raise IncompleteCheckpoint(
                f"{count} model files, but {tp} tensor-parallel ranks in {pp} stages wrote it",
                path=self._folder,
            )
        return tp, pp

    def _find_shapes(self) -> list[dict[str, Shape]]:
        """The trained parameters, by group, with the shapes that the first rank has of them."""
        groups: list[dict[str, Shape]] = []
        for stage in range(self._pp):
            for number, group in enumerate(param_shapes(*self._models[stage * self._tp])):
                if number == len(groups):
                    groups.append({})
                groups[number].update(
                    {name: shape for name, shape in group.items() if name not in groups[number]}
                )
        return groups

    # --- parameters

    def source(self) -> Source:
        made = TrainingState(self._path)
        masters: dict[str, SourceLeaf] = {}
        rules: dict[str, Rule] = {}
        for group, shapes in enumerate(self._shapes):
            for name, shape in shapes.items():
                masters[name], rules[name] = self._add_states(made, group, name, shape)
        self._add_module(made, masters, rules)
        for name, master in masters.items():
            made.model.setdefault(name, master)  # of ZeRO-3 there is no other weight than this
            made.states[name] = {FP32: master, **made.states[name]}
        self._add_tied(made)
        self._add_values(made)
        step = self._model.get(STEPS, 0)
        return source_of(self._path, KIND, made.tree(), step=step, facts=self._facts())

    def _add_states(
        self, made: TrainingState, group: int, name: str, shape: Shape
    ) -> tuple[SourceLeaf, Rule]:
        """Adds what the optimizer keeps for a parameter; gives its FP32 weight, and how ranks cut it."""
        if name != os.path.basename(name) or name in (".", "..", ""):
            raise CorruptCheckpoint("the name of a parameter is no name of a directory", leaf=name)
        folder = os.path.join(self._zero, name)
        try:
            states = sorted(file[:-3] for file in os.listdir(folder) if file.endswith(".pt"))
        except FileNotFoundError:
            states = []
        if FP32 not in states:
            raise IncompleteCheckpoint(
                f"the file {ZERO}/{name}/{FP32}.pt is missing", path=self._folder, leaf=name
            )
        place = f"optimizer.{name}"
        master, found = self._state_leaf(f"{place}.{FP32}", name, folder, FP32, shape)
        kept = made.states[name] = {}
        for state in states:
            if state == STEP:
                kept[STEP] = plain(self._read(f"{folder}/{STEP}.pt"), folder)
            elif state != FP32:
                leaf, _ = self._state_leaf(f"{place}.{state}", name, folder, state, shape)
                if leaf.shape != master.shape:
                    raise CorruptCheckpoint(
                        f"it has shape {list(leaf.shape)}, but the weight has {list(master.shape)}",
                        path=f"{folder}/{state}.pt",
                        leaf=leaf.name,
                    )
                kept[state] = leaf
        if STEP not in states:
            step = self._common_step(group)
            if step is not None:
                kept[STEP] = (
                    leaf_of(place, step) if isinstance(step, StoredTensor) else plain(step, self._path)
                )
        return master, found

    def _state_leaf(
        self, leaf: str, name: str, folder: str, state: str, shape: Shape
    ) -> tuple[SourceLeaf, Rule]:
        path = os.path.join(folder, f"{state}.pt")
        content = self._read(path)
        fields: Mapping[str, Any] = {}
        tensor = content
        if isinstance(content, dict):
            fields, tensor = content, content.get(PARAM)
        if not isinstance(tensor, StoredTensor):
            raise UnsupportedSource(f"{path}: there is no tensor in it")
        if not isinstance(content, dict) and len(tensor.shape) == 1 and shape != tensor.shape:
            return self._flat_leaf(leaf, name, tensor, shape, path), rule("*", replicated())
        if self._tp == 1 and tensor.shape != shape:
            raise CorruptCheckpoint(
                f"it has shape {list(tensor.shape)}, but the model's file says {list(shape)}",
                path=path,
                leaf=name,
            )
        return leaf_of(leaf, tensor), rule_of_fields(fields, tensor.shape, path)

    def _flat_leaf(self, leaf: str, name: str, tensor: StoredTensor, shape: Shape, path: str) -> SourceLeaf:
        count = math.prod(shape)
        if tensor.count != count or not tensor.contiguous:
            raise CorruptCheckpoint(
                f"a flat vector of {tensor.count} elements, but the parameter has {count}",
                path=path,
                leaf=name,
            )
        fragments = flat_fragments(tensor.file, tensor.offset, 0, count, shape, tensor.itemsize)
        return SourceLeaf(leaf, tensor.dtype, shape, fragments)

    def _common_step(self, group: int) -> object:
        """ZeRO-3 keeps the step with the state of its sub-groups."""
        inner = self._common.get(OPTIMIZER_DICT)
        states = inner.get("state") if isinstance(inner, dict) else None
        if not isinstance(states, dict):
            return None
        state = states.get(group, states.get(0))
        return state.get(STEP) if isinstance(state, dict) else None

    # --- the model

    def _add_module(
        self, made: TrainingState, masters: Mapping[str, SourceLeaf], rules: Mapping[str, Rule]
    ) -> None:
        """Weights as they were trained with, buffers and frozen parameters."""
        shared = self._model.get(SHARED) or {}
        frozen = self._model.get(FROZEN_SHAPES) or {}
        held: dict[str, list[list[SourceLeaf]]] = {}
        for rank, (path, content) in enumerate(self._models):
            module = content.get(MODULE)
            if module is not None and not isinstance(module, dict):
                raise UnsupportedSource(f"{path}: 'module' is not a state dict")
            for name, tensor in (module or {}).items():
                if tensor is None or name in shared:
                    continue
                if not isinstance(tensor, StoredTensor):
                    raise UnsupportedSource(f"{path}: entry {name!r} of the model is not a tensor")
                # ZeRO-3 leaves empty ones in place of what it cut over its ranks.
                empty = not tensor.count and self._true_count(name, masters, frozen)
                if not empty:
                    ranks = held.setdefault(name, [[] for _ in range(self._tp)])
                    ranks[rank % self._tp].append(lying_leaf(name, tensor))
        info = self._model.get(INFO)
        buffers = self._model.get(BUFFERS) or ()
        known = deepspeed_rules(info) if isinstance(info, dict) and self._tp > 1 else ()
        for name, holders in held.items():
            found = rules.get(name) or next((one for one in known if one.match.matches(name)), None)
            if found is not None and known and found is known[-1] and name in buffers:
                found = None  # the patterns are for parameters: every rank has the same
            if found is None or _all_alike(holders, masters.get(name)):
                found = rule("*", replicated())
            leaf = union(name, found, holders, leaf=f"model.{name}")
            if name in masters and leaf.shape != masters[name].shape:
                raise CorruptCheckpoint(
                    f"it has shape {list(leaf.shape)}, but its FP32 weight has {list(masters[name].shape)}",
                    path=self._models[0][0],
                    leaf=name,
                )
            made.model[name] = leaf
        for name, shape in frozen.items():
            if name not in held:
                made.model[name] = frozen_leaf(name, shape, self._models_with_pieces(name))

    def _true_count(self, name: str, masters: Mapping[str, SourceLeaf], frozen: Mapping[str, object]) -> int:
        shape: object = masters[name].shape if name in masters else frozen.get(name)
        return math.prod(shape) if is_shape(shape) and shape else 0

    def _models_with_pieces(self, name: str) -> list[tuple[str, Mapping[Any, Any]]]:
        world = len(self._pieces)
        if set(self._pieces) != set(range(world)) or world != self._model.get(DATA_RANKS):
            raise IncompleteCheckpoint(
                "model files are missing that have pieces of frozen parameters", path=self._folder, leaf=name
            )
        paths = [self._pieces[rank] for rank in range(world)]
        return [(path, self._model if rank == 0 else self._read(path)) for rank, path in enumerate(paths)]

    def _add_tied(self, made: TrainingState) -> None:
        for name, other in (self._model.get(SHARED) or {}).items():
            if other not in made.model:
                raise CorruptCheckpoint(
                    f"it is tied to {other!r}, which is missing", path=self._models[0][0], leaf=str(name)
                )
            made.model[name] = made.model[other]

    # --- values

    def _add_values(self, made: TrainingState) -> None:
        groups = self._common.get("param_groups")
        if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
            cut = FLAT_MASTERS in self._common  # of ZeRO-3 itself, which counts sub-groups
            if not cut and len(groups) == len(self._shapes) and not _named(groups):
                groups = [{**group, "params": list(self._shapes[i])} for i, group in enumerate(groups)]
            made.groups = plain(groups, self._path)
        add_values(made, self._model, self._common)

    def _facts(self) -> dict[str, str]:
        facts = {}
        if self._tp * self._pp > 1:
            facts = {"tensor parallel": str(self._tp), "pipeline stages": str(self._pp)}
        version = self._model.get(VERSION)
        if isinstance(version, str):
            facts["deepspeed"] = version
        return facts


def _all_alike(holders: Holders, master: SourceLeaf | None) -> bool:
    """Whether every rank holds all of a parameter."""
    return master is not None and all(held.shape == master.shape for copies in holders for held in copies)


def _named(groups: list[dict[str, Any]]) -> bool:
    return all(
        isinstance(group.get("params"), list) and all(isinstance(name, str) for name in group["params"])
        for group in groups
    )
