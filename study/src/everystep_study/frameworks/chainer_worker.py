"""Chainer in the study: npz compressed (its default) and plain, HDF5, Everystep."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
from chainer import serializers
from numpy.typing import NDArray

from everystep_study.frameworks import chainer_models
from everystep_study.frameworks.api import Arrays, EverystepMechanism, Framework, Mechanism, Training
from everystep_study.frameworks.chainer_probe import ChainerProbe, EverystepSnapshot, TrainerSnapshot
from everystep_study.frameworks.models import size_of
from everystep_study.peers.base import missing_modules


class ChainerTraining(Training):
    def __init__(self, model: str, quick: bool, seed: int) -> None:
        np.random.seed(seed)
        random.seed(seed)
        self.model, optimizer, self._inputs, self._targets = chainer_models.build(size_of(model, quick), seed)
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

    def serializable(self, weights_only: bool) -> Any:
        return self.model if weights_only else Both(self.model, self.optimizer)

    def everystep_state(self, weights_only: bool) -> object:
        from everystep.integrations.chainer import Serialized

        return {"all": Serialized(self.serializable(weights_only))}


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
    training: ChainerTraining

    def write(self, target: Path) -> None:
        serializers.save_npz(
            str(target), self.training.serializable(self.weights_only), compression=self.compressed
        )

    def load(self) -> None:
        serializers.load_npz(str(self.path), self.training.serializable(self.weights_only))

    def read_part(self, name: str) -> NDArray[Any]:
        place = name.replace(".", "/")
        with np.load(self.path) as archive:
            return np.asarray(archive[place if self.weights_only else f"model/{place}"])


class PlainNpz(Npz):
    key, title = "npz-plain", "npz, plain"
    compressed = False


class Hdf5(Mechanism):
    key, title, suffix = "hdf5", "HDF5", ".h5"
    training: ChainerTraining

    @classmethod
    def missing(cls) -> str | None:
        return missing_modules("h5py")

    def write(self, target: Path) -> None:
        serializers.save_hdf5(str(target), self.training.serializable(self.weights_only))

    def load(self) -> None:
        serializers.load_hdf5(str(self.path), self.training.serializable(self.weights_only))

    def read_part(self, name: str) -> NDArray[Any]:
        import h5py

        place = name.replace(".", "/")
        with h5py.File(self.path, "r") as file:
            return np.asarray(file[place if self.weights_only else f"model/{place}"])


class ChainerEverystep(EverystepMechanism):
    """A `Checkpointer` with the optimizer announced, as `integrations.chainer.snapshot` makes it."""

    training: ChainerTraining

    def make(self) -> Any:
        import everystep
        from everystep.integrations.chainer import Announced

        return everystep.Checkpointer(
            self.run,
            self.training.everystep_state(self.weights_only),
            mode=self.mode,
            optimizers=[Announced(self.training.optimizer)],
            keep=everystep.Keep(last=self.slots),
            preemption=False,
        )

    def read_part(self, name: str) -> NDArray[Any]:
        import everystep

        with everystep.open(self.path) as checkpoint:
            return np.asarray(checkpoint[f"all.{name}" if self.weights_only else f"all.model.{name}"][...])


class EverystepSync(ChainerEverystep):
    key, title, mode = "everystep-sync", "Everystep, sync", "sync"


class EverystepOverlap(ChainerEverystep):
    key, title, mode = "everystep-overlap", "Everystep, overlap", "overlap"
    background = True


class ChainerFramework(Framework):
    mechanisms = (Npz, PlainNpz, Hdf5, EverystepSync, EverystepOverlap)
    defaults = (TrainerSnapshot, EverystepSnapshot)

    def versions(self) -> dict[str, str]:
        return {"chainer": chainer.__version__, "numpy (with Chainer)": np.__version__}

    def build(self, model: str, quick: bool, seed: int) -> Training:
        return ChainerTraining(model, quick, seed)

    def probe(self, seed: int) -> ChainerProbe:
        return ChainerProbe(seed)


FRAMEWORK = ChainerFramework()
