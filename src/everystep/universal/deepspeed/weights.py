"""The weights, buffers and frozen parameters of the model, from all files that have some.

Without a pipeline they are in the model files, with one in a file for each layer; experts have files of their
own. ZeRO-3 has only buffers in the model files, and frozen parameters cut like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everystep.errors import IncompleteCheckpoint, UnsupportedSource
from everystep.universal.deepspeed.files import Folder, frozen_leaf
from everystep.universal.deepspeed.names import BUFFERS, FP32, FROZEN_SHAPES, MODULE, SHARED
from everystep.universal.deepspeed.optimizer_files import RankOptimizer
from everystep.universal.source import SourceLeaf
from everystep.universal.torch_file.leaves import lying_leaf
from everystep.universal.torch_file.reading import StoredTensor

_TIED = "tied_modules."


@dataclass(slots=True)
class Weights:
    """By name: for each tensor-parallel rank its tensor, and copies of other pipeline stages."""

    held: dict[str, list[list[SourceLeaf]]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)

    def add(self, tensor_ranks: int, tensor: int, name: str, held: SourceLeaf) -> None:
        self.held.setdefault(name, [[] for _ in range(tensor_ranks)])[tensor].append(held)


def read_weights(folder: Folder, optimizers: Mapping[int, RankOptimizer]) -> Weights:
    """All that the model files, layer files and expert files have."""
    degrees = folder.degrees
    found = Weights()
    ranks = [
        (tensor, degrees.model_rank(pipeline, tensor))
        for pipeline in range(degrees.pipeline)
        for tensor in range(degrees.tensor)
    ]
    for _, mp in ranks:
        found.tied.update(folder.model(mp).get(SHARED) or {})
        found.buffers.update(map(str, folder.model(mp).get(BUFFERS) or ()))
    for tensor, mp in ranks:
        _add_module(folder, found, tensor, mp, optimizers[mp])
        for path in folder.expert_files(mp):
            for name, stored in _tensors(path, folder.read(path)).items():
                found.add(degrees.tensor, tensor, name, lying_leaf(name, stored))
    if folder.files.layers:
        for tensor in range(degrees.tensor):
            _add_layers(folder, found, tensor, optimizers)
    _require_experts(folder)
    return found


def _tensors(path: str, tree: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, stored in tree.items():
        if stored is None:
            continue
        if not isinstance(stored, StoredTensor):
            raise UnsupportedSource(f"{path}: entry {name!r} of the model is not a tensor")
        found[str(name)] = stored
    return found


def _add_module(folder: Folder, found: Weights, tensor: int, mp: int, optimizer: RankOptimizer) -> None:
    path, module = folder.model_file(mp), folder.model(mp).get(MODULE)
    if folder.model(mp).get("ds_autoep_layers"):
        raise UnsupportedSource(f"{path}: experts that DeepSpeed's AutoEP has fused are not read")
    if module is None and folder.files.layers:
        return
    if not isinstance(module, dict):
        raise UnsupportedSource(f"{path}: 'module' is not a state dict; the model is in other files")
    frozen = _frozen(folder, mp) if optimizer.stage == 3 else {}
    in_pieces = {*optimizer.shapes, *frozen} if optimizer.stage == 3 else set()
    ranks = folder.degrees.tensor
    for name, stored in _tensors(path, {k: v for k, v in module.items() if k not in in_pieces}).items():
        if name not in found.tied:
            found.add(ranks, tensor, name, lying_leaf(name, stored))
    for name, held in frozen.items():
        found.add(ranks, tensor, name, held)
    if optimizer.stage == 3:
        for name, state in optimizer.states.items():
            found.add(ranks, tensor, name, state.tensors[FP32])


def _frozen(folder: Folder, mp: int) -> dict[str, SourceLeaf]:
    """Those of ZeRO-3, which are cut over data-parallel ranks."""
    shapes = folder.model(mp).get(FROZEN_SHAPES) or {}
    if not shapes:
        return {}
    models = []
    for rank in range(folder.degrees.data):
        if (mp, rank) not in folder.files.models:
            raise IncompleteCheckpoint(
                f"the model file of rank {rank} is missing, which has pieces of frozen parameters",
                path=folder.path,
            )
        models.append((folder.model_file(mp, rank), folder.model(mp, rank)))
    return {name: frozen_leaf(name, shape, models) for name, shape in shapes.items()}


# --- pipelines


def _add_layers(folder: Folder, found: Weights, tensor: int, optimizers: Mapping[int, RankOptimizer]) -> None:
    """Layer ``i`` is module ``i`` of the pipeline, except tied ones: these are ``tied_modules.KEY``."""
    known: dict[str, tuple[int, ...] | None] = dict.fromkeys(sorted(found.buffers))
    for stage in range(folder.degrees.pipeline):
        mp = folder.degrees.model_rank(stage, tensor)
        known.update(folder.model(mp).get(FROZEN_SHAPES) or {})
        known.update(optimizers[mp].shapes)
    for (layer, rank), path in sorted(folder.files.layers.items()):
        if rank == tensor:
            tensors = _tensors(path, folder.read(path))
            prefix = _layer_prefix(path, layer, tensors, known)
            for name, stored in tensors.items():
                found.add(folder.degrees.tensor, tensor, prefix + name, lying_leaf(prefix + name, stored))


def _layer_prefix(
    path: str,
    layer: int,
    tensors: Mapping[str, StoredTensor],
    known: Mapping[str, tuple[int, ...] | None],
) -> str:
    own = f"{layer}."
    if any(own + name in known for name in tensors):
        return own
    inner: dict[str, dict[str, tuple[int, ...] | None]] = {}
    for name, shape in known.items():
        if name.startswith(_TIED):
            key, _, last = name.removeprefix(_TIED).partition(".")
            inner.setdefault(f"{_TIED}{key}.", {})[last] = shape
    fitting = [
        prefix
        for prefix, shapes in inner.items()
        if all(name in tensors and shape in (None, tensors[name].shape) for name, shape in shapes.items())
    ]
    if len(fitting) > 1:
        raise UnsupportedSource(
            f"{path}: layer {layer} is tied, and {', '.join(fitting)} all have its shapes: the files do not "
            "say which it is"
        )
    return fitting[0] if fitting else own


def _require_experts(folder: Folder) -> None:
    """As many experts of each layer as the model file counts."""
    numbers = folder.model(0).get("num_experts")
    if not folder.files.experts or not isinstance(numbers, (list, tuple)):
        return
    for mp in range(folder.degrees.tensor * folder.degrees.pipeline):
        for layer, number in enumerate(numbers):
            for expert in range(number if type(number) is int else 0):
                if (mp, layer, expert) not in folder.files.experts:
                    raise IncompleteCheckpoint(
                        f"the file of expert {expert} of MoE layer {layer} is missing: there are {number}",
                        path=folder.path,
                    )
