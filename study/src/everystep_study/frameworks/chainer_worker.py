"""Chainer in the study: npz compressed (its default) and plain, HDF5, Everystep."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import chainer.functions as F
import numpy as np
from chainer import serializers
from numpy.typing import NDArray

from everystep_study.frameworks import chainer_models
from everystep_study.frameworks.api import Arrays, Framework, Training
from everystep_study.frameworks.chainer_probe import ChainerProbe, EverystepSnapshot, TrainerSnapshot
from everystep_study.frameworks.models import data, size_of
from everystep_study.mechanisms.mechanism import EverystepOverlap, EverystepSync, Mechanism


class ChainerTraining(Training):
    def __init__(self, model: str, quick: bool, seed: int) -> None:
        np.random.seed(seed)
        random.seed(seed)
        size = size_of(model, quick)
        self._inputs, targets = data(size, seed, channels_first=True)
        self._targets = targets.reshape(-1)
        self.model, optimizer = chainer_models.build(size)
        self.optimizer = optimizer.setup(self.model)
        self.step()  # makes the optimizer's state

    def step(self) -> float:
        loss = F.softmax_cross_entropy(self.model(self._inputs), self._targets)
        self.model.cleargrads()
        loss.backward()
        self.optimizer.update()
        return float(loss.array)

    def weights(self) -> Arrays:
        from everystep.integrations.chainer import Writer

        writer = Writer()
        writer.save(self.model)
        return dict(_flat(writer.tree))

    def optimizer_arrays(self) -> Arrays:
        return {
            f"{name.strip('/').replace('/', '.')}.{key}": array
            for name, parameter in self.model.namedparams()
            for key, array in parameter.update_rule.state.items()
        }

    def set_weights(self, arrays: Arrays) -> None:
        live = self.weights()
        for name, array in arrays.items():
            live[name][...] = array

    def tree(self, weights_only: bool = False) -> Any:
        return self.model if weights_only else Both(self.model, self.optimizer)

    def everystep_state(self, weights_only: bool) -> object:
        from everystep.integrations.chainer import Serialized

        return {"all": Serialized(self.tree(weights_only))}


class Both:
    """A model and its optimizer, as a trainer's snapshot has them in one file."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._parts = {"model": model, "optimizer": optimizer}

    def serialize(self, serializer: Any) -> None:
        for name, part in self._parts.items():
            part.serialize(serializer[name])


def _flat(tree: dict[str, Any], prefix: str = "") -> Any:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, np.ndarray):
            yield f"{prefix}{key}", value


class Npz(Mechanism):
    """`save_npz`, which compresses unless told not to."""

    key, title, suffix = "npz", "npz, compressed", ".npz"
    compressed = True
    subject: ChainerTraining

    def write(self, target: Path) -> None:
        serializers.save_npz(str(target), self.subject.tree(self.weights_only), compression=self.compressed)

    def load(self) -> None:
        serializers.load_npz(str(self.path), self.subject.tree(self.weights_only))

    def read_part(self, name: str) -> NDArray[Any]:
        place = name.replace(".", "/")
        with np.load(self.path) as archive:
            return np.asarray(archive[place if self.weights_only else f"model/{place}"])


class PlainNpz(Npz):
    key, title = "npz-plain", "npz, plain"
    compressed = False


class Hdf5(Mechanism):
    key, title, suffix = "hdf5", "HDF5", ".h5"
    needs = ("h5py",)
    subject: ChainerTraining

    def write(self, target: Path) -> None:
        serializers.save_hdf5(str(target), self.subject.tree(self.weights_only))

    def load(self) -> None:
        serializers.load_hdf5(str(self.path), self.subject.tree(self.weights_only))

    def read_part(self, name: str) -> NDArray[Any]:
        import h5py

        place = name.replace(".", "/")
        with h5py.File(self.path, "r") as file:
            return np.asarray(file[place if self.weights_only else f"model/{place}"])


class ChainerSync(EverystepSync):
    """With the optimizer announced, as `integrations.chainer.snapshot` does."""

    @property
    def prefix(self) -> str:  # type: ignore[override]
        return "all." if self.weights_only else "all.model."

    def options(self) -> dict[str, Any]:
        from everystep.integrations.chainer import Announced

        return {"optimizers": [Announced(self.subject.optimizer)]}


class ChainerOverlap(ChainerSync, EverystepOverlap):
    key, title, mode = EverystepOverlap.key, EverystepOverlap.title, EverystepOverlap.mode
    background = True


FRAMEWORK = Framework(
    packages={"chainer": "chainer", "numpy (with Chainer)": "numpy"},
    training=ChainerTraining,
    probe=ChainerProbe,
    mechanisms=(Npz, PlainNpz, Hdf5, ChainerSync, ChainerOverlap),
    defaults=(TrainerSnapshot, EverystepSnapshot),
)
