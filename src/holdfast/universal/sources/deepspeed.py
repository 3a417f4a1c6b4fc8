"""Checkpoints of DeepSpeed's ZeRO, stages 1, 2 and 3, described from the files of all ranks.

Names, for a parameter ``p``:

- ``model.p``: the weight as it was trained with (for example BF16), from the model's file. ZeRO-3 stores only
  the FP32 master weight, so there ``model.p`` is that weight.
- ``optimizer.p.fp32``: the FP32 master weight. For ZeRO-3 it is an alias of ``model.p``: the bytes exist
  once.
- ``optimizer.p.<state>``: what the optimizer keeps, for example ``exp_avg`` and ``step``. A state that is no
  array of the group's length (the step) belongs to all parameters of its group, and each gets it.
- Buffers and frozen parameters are ``model.<name>``; tied parameters are aliases.

Values: ``optimizer.param_groups`` (with names in place of numbers), ``lr_scheduler.*``, the counters, and the
client's own entries by their names.

ZeRO-1 and 2 lay the parameters of a group end to end, pad the result and cut it equally;
`param_slice_mappings` in each rank's file says which piece of which parameter lies where. ZeRO-3 cuts each
parameter into equal pieces (the last one padded) and lays a rank's pieces end to end, one flat vector for
each sub-group.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from holdfast.universal.pickle_machine import Record
from holdfast.universal.source import Source, SourceLeaf, Stretch, flat_stretches
from holdfast.universal.torch_file import StoredTensor, read_torch_file
from holdfast.universal.trees import Collected, leaf_of

KIND = "deepspeed"
_LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", re.ASCII)
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
CLASSES = frozenset(
    {
        _FRAGMENT,
        _STAGE,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    }
)
# What DeepSpeed itself puts into a model file; everything else is the client's.
OWN_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "num_experts",
    ]
)


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found, or None if this is nothing that `describe` reads."""
    try:
        folder = _tag_folder(os.path.abspath(path))
        names = os.listdir(folder)
    except (OSError, CorruptCheckpoint):
        return None
    if any(_OPTIMIZER.fullmatch(name) for name in names):
        return f"a DeepSpeed ZeRO checkpoint ({os.path.basename(folder)})"
    if any(_MODEL.fullmatch(name) for name in names) and any(name.startswith("layer_") for name in names):
        return "a DeepSpeed pipeline checkpoint"
    return None


def describe(path: str | os.PathLike[str], spec: object = None) -> Source:
    """The leaves and values of a ZeRO checkpoint: the directory with ``latest``, or one of its tags."""
    return _Checkpoint(os.path.abspath(path)).source()


def _tag_folder(path: str) -> str:
    """The directory of the newest tag, or the path itself if it is one."""
    latest = os.path.join(path, _LATEST)
    try:
        with open(latest, encoding="utf-8") as file:
            tag = file.read(4096).strip()
    except FileNotFoundError:
        return path
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"the file cannot be read: {error}", path=latest) from error
    if not tag or tag != os.path.basename(tag) or tag in (".", ".."):
        raise CorruptCheckpoint(f"the file does not name a directory beside it: {tag[:80]!r}", path=latest)
    folder = os.path.join(path, tag)
    if not os.path.isdir(folder):
        raise IncompleteCheckpoint(f"the directory {tag!r}, which 'latest' names, is missing", path=path)
    return folder


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements `start` to `stop` of a parameter lie in the flat vectors of a rank from element `first` on."""

    rank: int
    group: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Flat:
    """What one rank's optimizer file holds, in one form for all stages: a list by group."""

    path: str
    masters: Sequence[StoredTensor]
    states: Sequence[Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    content: Mapping[str, Any]


class _Checkpoint:
    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = _tag_folder(path)
        self._models: dict[int, str] = {}
        self._optimizers: dict[int, str] = {}
        self._list_files()
        self._model = self._read_model(self._models[min(self._models)])
        self._world = self._number("dp_world_size")
        self._require_ranks()
        self._flats = [self._read_optimizer(self._optimizers[rank]) for rank in range(self._world)]
        self._stage = self._find_stage()
        self._shapes = self._find_shapes()

    # --- the files

    def _list_files(self) -> None:
        parallel: set[int] = set()
        for name in sorted(os.listdir(self._folder)):
            where = os.path.join(self._folder, name)
            if match := _MODEL.fullmatch(name):
                self._models[int(match[1] or 0)] = where
                parallel.add(int(match[2]))
            elif match := _OPTIMIZER.fullmatch(name):
                rank = int(match[1])
                if rank in self._optimizers and int(match[2]) == 0:
                    raise CorruptCheckpoint(f"two optimizer files of rank {rank}", path=self._folder)
                self._optimizers[rank] = where
                parallel.add(int(match[2]))
            elif name.startswith("layer_") or name.startswith("expp_rank_"):
                raise UnsupportedSource(
                    f"{where}: pipeline and expert-parallel checkpoints of DeepSpeed are not read yet"
                )
        if len(parallel) > 1:
            raise UnsupportedSource(
                f"{self._folder}: {len(parallel)} model-parallel ranks; only 1 is read yet"
            )
        if not self._optimizers:
            raise IncompleteCheckpoint("there is no *_optim_states.pt file", path=self._folder)
        if not self._models:
            raise IncompleteCheckpoint("there is no *_model_states.pt file", path=self._folder)

    def _require_ranks(self) -> None:
        if not 0 < self._world <= 1 << 20:
            raise CorruptCheckpoint(f"a world of {self._world} ranks", path=self._models[min(self._models)])
        for rank in range(self._world):
            if rank not in self._optimizers:
                raise IncompleteCheckpoint(
                    f"the optimizer file of rank {rank} is missing: {self._world} ranks wrote the checkpoint",
                    path=self._folder,
                )
        if len(self._optimizers) > self._world:
            raise CorruptCheckpoint(
                f"{len(self._optimizers)} optimizer files, but {self._world} ranks wrote it: files of two "
                "checkpoints are mixed",
                path=self._folder,
            )

    def _read_model(self, path: str) -> dict[str, Any]:
        content = read_torch_file(path, CLASSES)
        if not isinstance(content, dict) or "param_shapes" not in content:
            raise UnsupportedSource(f"{path}: there is no 'param_shapes'; this is not a model file of ZeRO")
        return content

    def _read_optimizer(self, path: str) -> _Flat:
        content = read_torch_file(path, CLASSES)
        inner = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(inner, dict):
            raise UnsupportedSource(f"{path}: there is no 'optimizer_state_dict'")
        if "fp32_flat_groups" in inner:
            masters, base = inner["fp32_flat_groups"], inner.get("optimizer_state_dict")
        else:
            masters, base = inner.get("single_partition_of_fp32_groups"), inner.get("base_optimizer_state")
        if not isinstance(masters, list) or not all(isinstance(one, StoredTensor) for one in masters):
            raise UnsupportedSource(f"{path}: the FP32 weights are in a form that is not known")
        states, groups = self._states(path, base, len(masters))
        return _Flat(path, masters, states, groups, inner)

    def _states(
        self, path: str, base: object, count: int
    ) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        """The optimizer's states by group, and its param_groups."""
        groups: object = []
        if isinstance(base, dict):
            found, groups = base.get("state"), base.get("param_groups")
            if isinstance(found, dict):
                states = [found.get(index, {}) for index in range(count)]
                if not set(found) <= set(range(count)):
                    raise UnsupportedSource(
                        f"{path}: the optimizer counts more groups than there are weights"
                    )
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

    def _number(self, name: str) -> int:
        value = self._model.get(name)
        if type(value) is not int:
            raise UnsupportedSource(f"{self._models[min(self._models)]}: {name!r} is not a number")
        return value

    def _find_stage(self) -> int:
        stages: set[int] = set()
        for flat in self._flats:
            stage = flat.content.get("zero_stage", 1)
            if isinstance(stage, Record) and stage.name == _STAGE and len(stage.args) == 1:
                stage = stage.args[0]
            if type(stage) is not int or not 1 <= stage <= 3:
                raise UnsupportedSource(f"{flat.path}: ZeRO stage {stage!r} is not known")
            if (stage == 3) != ("fp32_flat_groups" in flat.content):
                raise UnsupportedSource(
                    f"{flat.path}: the weights are not laid out as ZeRO stage {stage} does"
                )
            stages.add(stage)
        if len(stages) != 1:
            raise CorruptCheckpoint(
                f"the files of ranks have ZeRO stages {sorted(stages)}", path=self._folder
            )
        return stages.pop()

    def _find_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        shapes = self._model["param_shapes"]
        path = self._models[min(self._models)]
        if isinstance(shapes, dict):
            shapes = [shapes]
        if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
            raise UnsupportedSource(f"{path}: 'param_shapes' is in a form that is not known")
        for group in shapes:
            for name, shape in group.items():
                if not isinstance(name, str) or not _is_shape(shape):
                    raise CorruptCheckpoint("the shape of a parameter is damaged", path=path, leaf=str(name))
        for flat in self._flats:
            if len(flat.masters) != len(shapes):
                raise CorruptCheckpoint(
                    f"{len(flat.masters)} groups of weights, but the model file has {len(shapes)}",
                    path=flat.path,
                )
        return shapes

    # --- where the pieces of a parameter lie

    def _pieces(self, group: int) -> dict[str, list[_Piece]]:
        return self._whole_pieces(group) if self._stage == 3 else self._cut_pieces(group)

    def _cut_pieces(self, group: int) -> dict[str, list[_Piece]]:
        """ZeRO-1 and 2: what each rank's slice mappings say, in the order of ranks."""
        found: dict[str, list[_Piece]] = {name: [] for name in self._shapes[group]}
        done = dict.fromkeys(found, 0)
        for rank, flat in enumerate(self._flats):
            mappings = flat.content.get("param_slice_mappings")
            if not isinstance(mappings, list) or len(mappings) != len(flat.masters):
                raise UnsupportedSource(
                    f"{flat.path}: 'param_slice_mappings' is missing; DeepSpeed is too old"
                )
            mapping = mappings[group]
            if not isinstance(mapping, dict):
                raise UnsupportedSource(f"{flat.path}: 'param_slice_mappings' is in a form that is not known")
            for name, address in mapping.items():
                if name not in found:
                    raise CorruptCheckpoint(
                        "the model file does not have this parameter", path=flat.path, leaf=str(name)
                    )
                known = address.attributes if isinstance(address, Record) else {}
                count, first = known.get("numel"), known.get("start")
                if type(count) is not int or type(first) is not int or count < 0 or first < 0:
                    raise CorruptCheckpoint("the place of a piece is damaged", path=flat.path, leaf=name)
                start = done[name]
                done[name] += count
                found[name].append(_Piece(rank, group, first, start, start + count))
        for name, shape in self._shapes[group].items():
            if done[name] != math.prod(shape):
                raise CorruptCheckpoint(
                    f"all ranks hold {done[name]} elements, but the parameter has {math.prod(shape)}: "
                    "a file is of another checkpoint",
                    path=self._folder,
                    leaf=name,
                )
        return found

    def _whole_pieces(self, group: int) -> dict[str, list[_Piece]]:
        """ZeRO-3: each parameter takes the same number of elements on every rank, the last ones padded."""
        found: dict[str, list[_Piece]] = {}
        first = 0
        for name, shape in self._shapes[group].items():
            count = math.prod(shape)
            part = -(-count // self._world)
            cuts = [(min(count, rank * part), min(count, (rank + 1) * part)) for rank in range(self._world)]
            found[name] = [
                _Piece(rank, group, first, start, stop)
                for rank, (start, stop) in enumerate(cuts)
                if start < stop
            ]
            first += part
        return found

    def _leaf(
        self, name: str, parameter: str, shape: tuple[int, ...], vectors: list[Any], pieces: list[_Piece]
    ) -> SourceLeaf:
        """A leaf of pieces of the flat vectors of ranks (`vectors`, by rank)."""
        stretches: list[Stretch] = []
        kinds: set[str] = set()
        for piece in pieces:
            vector, path = vectors[piece.rank], self._flats[piece.rank].path
            if not isinstance(vector, StoredTensor):
                raise CorruptCheckpoint(
                    f"{name!r} is missing in the file of this rank", path=path, leaf=parameter
                )
            if len(vector.shape) != 1 or not vector.contiguous:
                raise UnsupportedSource(f"{path}: {name!r} is not a flat vector but has shape {vector.shape}")
            end = piece.first + piece.stop - piece.start
            if end > vector.count:
                raise CorruptCheckpoint(
                    f"elements up to {end} are needed of a flat vector with {vector.count}",
                    path=path,
                    leaf=parameter,
                )
            kinds.add(vector.dtype)
            offset = vector.offset + piece.first * vector.itemsize
            stretches += flat_stretches(vector.file, offset, piece.start, piece.stop, shape, vector.itemsize)
        if len(kinds) > 1:
            raise CorruptCheckpoint(
                f"ranks have {name!r} in types {sorted(kinds)}", path=self._folder, leaf=parameter
            )
        return SourceLeaf(name, kinds.pop() if kinds else "F32", shape, tuple(stretches))

    # --- leaves and values

    def source(self) -> Source:
        self._require_one_step()
        into = Collected(self._path)
        leaves: dict[str, SourceLeaf] = {}
        aliases: dict[str, str] = {}
        for group, shapes in enumerate(self._shapes):
            pieces = self._pieces(group)
            for name, shape in shapes.items():
                self._add_parameter(into, leaves, aliases, group, name, shape, pieces[name])
        self._add_module(leaves, aliases)
        self._add_values(into)
        others, more = into.leaves()
        for leaf in others:
            leaves[leaf.name] = leaf
        aliases.update(more)
        return Source(
            path=self._path,
            kind=KIND,
            step=self._number("global_steps"),
            leaves=tuple(leaves.values()),
            values=into.values,
            aliases=aliases,
            facts=self._facts(),
        )

    def _add_parameter(
        self,
        into: Collected,
        leaves: dict[str, SourceLeaf],
        aliases: dict[str, str],
        group: int,
        name: str,
        shape: tuple[int, ...],
        pieces: list[_Piece],
    ) -> None:
        place = f"optimizer.{name}"
        masters = [flat.masters[group] for flat in self._flats]
        master = f"model.{name}" if self._stage == 3 else f"{place}.fp32"
        leaves[master] = self._leaf(master, name, shape, masters, pieces)
        if self._stage == 3:
            aliases[f"{place}.fp32"] = master
        states = [flat.states[group] for flat in self._flats]
        keys = {key: None for state in states for key in state}
        for key in keys:
            entries = [state.get(key) for state in states]
            if isinstance(entries[0], StoredTensor) and _is_vector(entries[0], masters[0]):
                leaf = self._leaf(f"{place}.{key}", name, shape, entries, pieces)
                leaves[leaf.name] = leaf
            elif isinstance(entries[0], StoredTensor):
                self._require_equal(entries, key, name)
                leaves[f"{place}.{key}"] = leaf_of(f"{place}.{key}", entries[0])
            else:
                if any(entry != entries[0] for entry in entries):
                    raise CorruptCheckpoint(f"ranks disagree about {key!r}", path=self._folder, leaf=name)
                into.add_value(f"{place}.{key}", entries[0])

    def _require_equal(self, entries: list[Any], key: str, name: str) -> None:
        """Numbers that every rank keeps for itself, such as the step, are the same on all."""
        contents: set[bytes] = set()
        for entry, flat in zip(entries, self._flats, strict=True):
            if not isinstance(entry, StoredTensor):
                raise CorruptCheckpoint(
                    f"{key!r} is missing in the file of this rank", path=flat.path, leaf=name
                )
            with open(entry.file, "rb") as file:
                file.seek(entry.offset)
                contents.add(file.read(entry.itemsize * entry.count))
        if len(contents) != 1:
            raise CorruptCheckpoint(
                f"ranks disagree about {key!r}: files of two steps are mixed", path=self._folder, leaf=name
            )

    def _require_one_step(self) -> None:
        steps: dict[int, str] = {}
        for rank in self._models:
            model = self._model if rank == min(self._models) else self._read_model(self._models[rank])
            steps.setdefault(model.get("global_steps", 0), self._models[rank])
        if len(steps) > 1:
            raise CorruptCheckpoint(
                f"the model files are of steps {', '.join(map(str, steps))}: several steps are mixed",
                path=self._folder,
            )

    def _add_module(self, leaves: dict[str, SourceLeaf], aliases: dict[str, str]) -> None:
        """Weights as they were trained with, buffers, frozen and tied parameters."""
        path = self._models[min(self._models)]
        module = self._model.get("module")
        if not isinstance(module, dict):
            raise UnsupportedSource(f"{path}: 'module' is not a state dict; the model is in other files")
        shared = self._model.get("shared_params") or {}
        frozen = self._frozen()
        trained = {name for group in self._shapes for name in group}
        for name, tensor in module.items():
            if name in shared or (self._stage == 3 and (name in trained or name in frozen)):
                continue
            if not isinstance(tensor, StoredTensor):
                if tensor is None:
                    continue
                raise UnsupportedSource(f"{path}: entry {name!r} of the model is not a tensor")
            leaves[f"model.{name}"] = leaf_of(f"model.{name}", tensor)
        if self._stage == 3:
            leaves.update({f"model.{name}": leaf for name, leaf in frozen.items()})
        for name, other in shared.items():
            if f"model.{other}" not in leaves:
                raise CorruptCheckpoint(
                    f"it is tied to {other!r}, which is missing", path=path, leaf=str(name)
                )
            aliases[f"model.{name}"] = f"model.{other}"
        for name in trained:
            if f"model.{name}" not in leaves:
                raise CorruptCheckpoint("the parameter is missing in the model file", path=path, leaf=name)

    def _frozen(self) -> dict[str, SourceLeaf]:
        """ZeRO-3 cuts frozen parameters as it does the others; the pieces are in the model files of ranks."""
        shapes = self._model.get("frozen_param_shapes") or {}
        if self._stage != 3 or not shapes:
            return {}
        parts: list[tuple[str, Mapping[str, Any]]] = []
        for rank in range(self._world):
            if rank not in self._models:
                raise IncompleteCheckpoint(
                    f"the model file of rank {rank} is missing, which has pieces of frozen parameters",
                    path=self._folder,
                )
            path = self._models[rank]
            content = self._model if rank == min(self._models) else self._read_model(path)
            parts.append((path, content.get("frozen_param_fragments") or {}))
        leaves: dict[str, SourceLeaf] = {}
        for name, shape in shapes.items():
            if not _is_shape(shape):
                raise CorruptCheckpoint(
                    "the shape of a parameter is damaged", path=parts[0][0], leaf=str(name)
                )
            count = math.prod(shape)
            part = -(-count // self._world)
            stretches: list[Stretch] = []
            dtype = "F32"
            for rank, (path, fragments) in enumerate(parts):
                start, stop = min(count, rank * part), min(count, (rank + 1) * part)
                piece = fragments.get(name)
                if not isinstance(piece, StoredTensor) or not piece.contiguous or piece.count < stop - start:
                    raise CorruptCheckpoint(
                        "the piece of a frozen parameter is missing", path=path, leaf=name
                    )
                dtype = piece.dtype
                stretches += flat_stretches(piece.file, piece.offset, start, stop, shape, piece.itemsize)
            leaves[name] = SourceLeaf(f"model.{name}", dtype, shape, tuple(stretches))
        return leaves

    def _add_values(self, into: Collected) -> None:
        groups = self._flats[0].groups
        if groups and self._stage != 3 and len(groups) == len(self._shapes):
            named = [{**group, "params": list(self._shapes[index])} for index, group in enumerate(groups)]
            into.add_value("optimizer.param_groups", named)
        elif groups:
            into.add_value("optimizer.param_groups", groups)
        for key, value in self._model.items():
            if key not in OWN_KEYS:
                into.add(value, str(key))
        for key in ("global_steps", "global_samples", "skipped_steps"):
            if type(self._model.get(key)) is int:
                into.add_value(key, self._model[key])
        if self._model.get("lr_scheduler") is not None:
            into.add(self._model["lr_scheduler"], "lr_scheduler")
        for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
            if self._flats[0].content.get(key) is not None:
                into.add_value(f"deepspeed.{key}", self._flats[0].content[key])

    def _facts(self) -> dict[str, str]:
        facts = {"zero stage": str(self._stage), "data parallel": str(self._world)}
        version = self._model.get("ds_version")
        if isinstance(version, str):
            facts["deepspeed"] = version
        return facts


def _is_vector(entry: StoredTensor, master: StoredTensor) -> bool:
    """Whether a state has an element for each of a group's, and not one number for the whole group."""
    return bool(entry.shape) and (entry.count > 1 or master.count <= 1)


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in value)
