"""The files of a DeepSpeed checkpoint: which there are, whose they are, and what they hold.

Ranks have three numbers: tensor, pipeline and data parallel. A model-parallel rank (``mp_rank`` in names) is
``pipeline rank * tensor-parallel degree + tensor rank``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.universal.deepspeed.layout.everystep_files import read_everystep_file
from everystep.universal.deepspeed.names import CLASSES
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file

_LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", re.ASCII)
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt", re.ASCII)
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt", re.ASCII)
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", re.ASCII)
_MOST_RANKS = 1 << 20


def tag_folder(path: str) -> str:
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
        if match := _MODEL.fullmatch(name):
            found.models[int(match[2]), int(match[1] or 0)] = where
        elif match := _OPTIMIZER.fullmatch(name):
            rank = (int(match[2]), int(match[1]))
            if rank in found.optimizers:
                raise CorruptCheckpoint(f"two optimizer files of rank {rank[1]}", path=folder)
            found.optimizers[rank] = where
        elif match := _LAYER.fullmatch(name):
            found.layers[int(match[1]), int(match[2] or 0)] = where
        elif match := _EXPERT.fullmatch(name):
            found.experts[int(match[3]), int(match[1]), int(match[2])] = where
        elif match := _EXPERT_OPTIMIZER.fullmatch(name):
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
        data = content.get("dp_world_size")
        if type(data) is not int:
            raise UnsupportedSource(f"{first}: 'dp_world_size' is not a number")
        if not 0 < data <= _MOST_RANKS:
            raise CorruptCheckpoint(f"a world of {data} ranks", path=first)
        said = content.get("checkpoint_parallel_dimensions")
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
            if self.model(0).get("param_shapes") is not None:
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
        steps: dict[Any, str] = {}
        for path in self.files.models.values():
            steps.setdefault(self.read(path).get("global_steps", 0), path)
        if len(steps) > 1:
            raise CorruptCheckpoint(
                f"the model files are of steps {', '.join(map(str, steps))}: several steps are mixed",
                path=self.path,
            )
        worlds = {self.read(path).get("dp_world_size") for path in self.files.models.values()}
        if len(worlds) > 1:
            raise CorruptCheckpoint(
                f"the model files are of {', '.join(map(str, worlds))} data-parallel ranks: several "
                "checkpoints are mixed",
                path=self.path,
            )


def content_of(entry: StoredTensor) -> bytes:
    """The bytes of a small tensor."""
    with open(entry.file, "rb") as file:
        file.seek(entry.offset)
        return file.read(entry.itemsize * entry.count)
