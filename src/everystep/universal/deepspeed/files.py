"""The files of a DeepSpeed checkpoint: which there are, whose they are, and what they hold.

Ranks have three numbers: tensor, pipeline and data parallel. A model-parallel rank (``mp_rank`` in names) is
``pipeline rank * tensor-parallel degree + tensor rank``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.universal.deepspeed.everystep_files import read_everystep_file
from everystep.universal.deepspeed.names import (
    BUFFERS,
    CLASSES,
    COUNTERS,
    DATA_RANKS,
    DEGREES,
    EXPERT_FILE,
    EXPERT_OPTIMIZER_FILE,
    FROZEN_PIECES,
    GLOBAL_STATE,
    INFO,
    LATEST,
    LATEST_UNIVERSAL,
    LAYER_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    OWN_KEYS,
    PARAM_SHAPES,
    SCHEDULER,
    STEPS,
)
from everystep.universal.source import SourceFragment, SourceLeaf, flat_fragments
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file
from everystep.universal.torch_file.torch_values import is_shape
from everystep.universal.training_state import TrainingState, plain

_MOST_RANKS = 1 << 20


Shape = tuple[int, ...]


def tag_folder(path: str, latest: str = LATEST) -> str:
    """The directory that the file `latest` names, or the path itself if there is no such file."""
    where = os.path.join(path, latest)
    try:
        with open(where, encoding="utf-8") as file:
            tag = file.read(4096).strip()
    except FileNotFoundError:
        return path
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"the file cannot be read: {error}", path=where) from error
    if tag == "." and latest == LATEST_UNIVERSAL:
        return path
    if not tag or tag != os.path.basename(tag) or tag in (".", ".."):
        raise CorruptCheckpoint(f"the file does not name a directory beside it: {tag[:80]!r}", path=where)
    folder = os.path.join(path, tag)
    if not os.path.isdir(folder):
        raise IncompleteCheckpoint(f"the directory {tag!r}, which {latest!r} names, is missing", path=path)
    return folder


@dataclass(slots=True)
class Files:
    """The paths, by what their names say. Ranks that have no number in a name are 0."""

    folder: str
    models: dict[tuple[int, int], str] = field(default_factory=dict)
    """By model-parallel and data-parallel rank; one for all of the latter, except in ZeRO-3."""
    optimizers: dict[tuple[int, int], str] = field(default_factory=dict)
    """By model-parallel and data-parallel rank."""
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    """By layer and tensor-parallel rank."""
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """By model-parallel rank, number of the MoE layer, and number of the expert."""
    expert_optimizers: dict[tuple[int, int], str] = field(default_factory=dict)
    """By model-parallel and expert-parallel rank."""


def list_files(folder: str) -> Files:
    """What a tag's directory has. Files with other names are not DeepSpeed's own, and are left alone."""
    found = Files(folder)
    for name in sorted(os.listdir(folder)):
        where = os.path.join(folder, name)
        if match := MODEL_FILE.fullmatch(name):
            found.models[int(match[2]), int(match[1] or 0)] = where
        elif match := OPTIMIZER_FILE.fullmatch(name):
            rank = (int(match[2]), int(match[1]))
            if rank in found.optimizers:
                raise CorruptCheckpoint(f"two optimizer files of rank {rank[1]}", path=folder)
            found.optimizers[rank] = where
        elif match := LAYER_FILE.fullmatch(name):
            found.layers[int(match[1]), int(match[2] or 0)] = where
        elif match := EXPERT_FILE.fullmatch(name):
            found.experts[int(match[3]), int(match[1]), int(match[2])] = where
        elif match := EXPERT_OPTIMIZER_FILE.fullmatch(name):
            found.expert_optimizers[int(match[2]), int(match[1])] = where
    return found


@dataclass(frozen=True, slots=True)
class Degrees:
    tensor: int
    pipeline: int
    data: int

    def model_rank(self, pipeline: int, tensor: int) -> int:
        return pipeline * self.tensor + tensor


class Folder:
    """The files of one tag, complete and of one world; the content of each is read once."""

    def __init__(self, path: str) -> None:
        self.files = list_files(tag_folder(path))
        self.path = self.files.folder
        if not self.files.models:
            raise IncompleteCheckpoint("there is no *_model_states.pt file", path=self.path)
        self._content: dict[str, dict[Any, Any]] = {}
        self.degrees = self._find_degrees()
        self._require_model_files()
        self._require_optimizer_files()
        self._require_one_step()

    # --- content

    def read(self, path: str) -> dict[Any, Any]:
        if path not in self._content:
            content = read_everystep_file(path) if os.path.isdir(path) else read_torch_file(path, CLASSES)
            if not isinstance(content, dict):
                raise UnsupportedSource(f"{path}: a {type(content).__name__}, not what DeepSpeed saves")
            self._content[path] = content
        return self._content[path]

    def model_file(self, mp: int, dp: int = 0) -> str:
        """In ZeRO-3, each data-parallel rank has its own."""
        return self.files.models.get((mp, dp)) or self.files.models[mp, 0]

    def model(self, mp: int, dp: int = 0) -> dict[Any, Any]:
        return self.read(self.model_file(mp, dp))

    def expert_files(self, mp: int) -> list[str]:
        """The files of experts, layer by layer."""
        return [path for (of, _, _), path in sorted(self.files.experts.items()) if of == mp]

    # --- which ranks there are

    def _find_degrees(self) -> Degrees:
        first = self.files.models[min(self.files.models)]
        content = self.read(first)
        data = content.get(DATA_RANKS)
        if type(data) is not int:
            raise UnsupportedSource(f"{first}: 'dp_world_size' is not a number")
        if not 0 < data <= _MOST_RANKS:
            raise CorruptCheckpoint(f"a world of {data} ranks", path=first)
        said = content.get(DEGREES)
        tensor: Any
        pipeline: Any
        if isinstance(said, Mapping):
            tensor, pipeline = said.get("tp_degree"), said.get("pp_degree")
        else:  # DeepSpeed before 0.19 did not say
            ranks = 1 + max(mp for mp, _ in self.files.models)
            tensor = 1 + max(tp for _, tp in self.files.layers) if self.files.layers else ranks
            pipeline = -(-ranks // tensor)
        for number in (tensor, pipeline):
            if type(number) is not int or not 0 < number <= _MOST_RANKS:
                raise CorruptCheckpoint(f"its parallel degrees are damaged: {number!r}", path=first)
        return Degrees(tensor, pipeline, data)

    def _require_model_files(self) -> None:
        degrees = self.degrees
        number = degrees.tensor * degrees.pipeline
        held = {mp for mp, _ in self.files.models}
        for mp in range(number):
            if mp not in held:
                raise IncompleteCheckpoint(
                    f"the model file of model-parallel rank {mp} is missing: tensor parallel "
                    f"{degrees.tensor} x pipeline parallel {degrees.pipeline} wrote the checkpoint",
                    path=self.path,
                )
        if len(held) > number:
            raise CorruptCheckpoint(
                f"model files of {len(held)} model-parallel ranks, but {number} wrote it: files of two "
                "checkpoints are mixed",
                path=self.path,
            )
        for layer in sorted({layer for layer, _ in self.files.layers}):
            for tensor in range(degrees.tensor):
                if (layer, tensor) not in self.files.layers:
                    raise IncompleteCheckpoint(
                        f"the file of layer {layer} of tensor-parallel rank {tensor} is missing",
                        path=self.path,
                    )

    def _require_optimizer_files(self) -> None:
        degrees, files = self.degrees, self.files.optimizers
        if not files:
            if self.model(0).get(PARAM_SHAPES) is not None:
                raise IncompleteCheckpoint("there is no *_optim_states.pt file", path=self.path)
            return
        for mp in range(degrees.tensor * degrees.pipeline):
            for rank in range(degrees.data):
                if (mp, rank) not in files:
                    of = f" of model-parallel rank {mp}" if degrees.tensor * degrees.pipeline > 1 else ""
                    raise IncompleteCheckpoint(
                        f"the optimizer file of rank {rank} is missing{of}: {degrees.data} ranks wrote the "
                        "checkpoint",
                        path=self.path,
                    )
        expected = degrees.tensor * degrees.pipeline * degrees.data
        if len(files) > expected:
            raise CorruptCheckpoint(
                f"{len(files)} optimizer files, but {expected} ranks wrote it: files of two "
                "checkpoints are mixed",
                path=self.path,
            )

    def _require_one_step(self) -> None:
        require_one_step(self.path, map(self.read, self.files.models.values()))
        worlds = {self.read(path).get(DATA_RANKS) for path in self.files.models.values()}
        if len(worlds) > 1:
            raise CorruptCheckpoint(
                f"the model files are of {', '.join(map(str, worlds))} data-parallel ranks: several "
                "checkpoints are mixed",
                path=self.path,
            )


# --- what a model file has


def require_one_step(folder: str, models: Iterable[Mapping[Any, Any]]) -> None:
    steps = {content.get(STEPS, 0): None for content in models}
    if len(steps) > 1:
        raise CorruptCheckpoint(
            f"the model files are of steps {', '.join(map(str, steps))}: several steps are mixed", path=folder
        )


def param_shapes(path: str, model: Mapping[Any, Any]) -> list[dict[str, Shape]]:
    """The shapes of trained parameters by name, a dictionary for each group, in the order of the file."""
    shapes = model.get(PARAM_SHAPES)
    if shapes is None:
        raise UnsupportedSource(f"{path}: there is no {PARAM_SHAPES!r}; this is not a model file of ZeRO")
    if isinstance(shapes, dict):
        shapes = [shapes]
    if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
        raise UnsupportedSource(f"{path}: {PARAM_SHAPES!r} is in a form that is not known")
    for group in shapes:
        for name, shape in group.items():
            if not isinstance(name, str) or not is_shape(shape):
                raise CorruptCheckpoint("the shape of a parameter is damaged", path=path, leaf=str(name))
    return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]


def partition(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """The elements that ZeRO-3 gives to a rank, of a parameter (or frozen one) with `count`."""
    part = -(-count // ranks)
    return min(count, rank * part), min(count, (rank + 1) * part)


def frozen_leaf(name: str, shape: object, models: Sequence[tuple[str, Mapping[Any, Any]]]) -> SourceLeaf:
    """ZeRO-3 cuts frozen parameters, too: each data-parallel rank's model file has a piece."""
    if not is_shape(shape):
        raise CorruptCheckpoint("the shape of a parameter is damaged", path=models[0][0], leaf=str(name))
    fragments: list[SourceFragment] = []
    dtype = "F32"
    for rank, (path, model) in enumerate(models):
        piece = (model.get(FROZEN_PIECES) or {}).get(name)
        start, stop = partition(math.prod(shape), len(models), rank)
        if not isinstance(piece, StoredTensor) or not piece.contiguous or piece.count < stop - start:
            raise CorruptCheckpoint("the piece of a frozen parameter is missing", path=path, leaf=name)
        dtype = piece.dtype
        fragments += flat_fragments(piece.file, piece.offset, start, stop, shape, piece.itemsize)
    return SourceLeaf(f"model.{name}", dtype, shape, tuple(fragments))


def add_values(made: TrainingState, model: Mapping[Any, Any], optimizer: Mapping[Any, Any]) -> None:
    """What a model file says beside the model, and an optimizer's file beside its states."""
    for key, value in model.items():
        if key not in OWN_KEYS:
            made.rest[key] = plain(value, made.path)
    for key in COUNTERS:
        if type(model.get(key)) is int:
            made.rest[key] = model[key]
    if model.get(SCHEDULER) is not None:
        made.rest[SCHEDULER] = plain(model[SCHEDULER], made.path)
    own = {key: plain(optimizer[key], made.path) for key in GLOBAL_STATE if optimizer.get(key) is not None}
    if isinstance(model.get(INFO), dict):
        own[INFO] = plain(model[INFO], made.path)
    if isinstance(model.get(BUFFERS), list):
        own[BUFFERS] = model[BUFFERS]
    if own:
        made.rest["deepspeed"] = own


def content_of(entry: StoredTensor) -> bytes:
    """The bytes of a small tensor."""
    with open(entry.file, "rb") as file:
        file.seek(entry.offset)
        return file.read(entry.itemsize * entry.count)
