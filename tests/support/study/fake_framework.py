"""A framework for the study that is nothing but numpy: a small one, and one with every trouble."""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from everystep_study.frameworks.api import Arrays, DefaultCheckpoint, Framework, Probe, Training
from everystep_study.mechanisms.mechanism import Mechanism


class FakeTraining(Training):
    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.weight = draw.standard_normal((64, 64)).astype(np.float32)
        self.momentum = np.zeros_like(self.weight)

    def step(self) -> float:
        self.momentum = (0.9 * self.momentum + self.weight).astype(np.float32)
        self.weight = (self.weight - 0.01 * self.momentum).astype(np.float32)
        return float((self.weight**2).mean())

    def weights(self) -> Arrays:
        return {"weight": self.weight}

    def optimizer_arrays(self) -> Arrays:
        return {"momentum": self.momentum}

    def set_weights(self, arrays: Arrays) -> None:
        self.weight = np.array(arrays["weight"])

    def put(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.weight = arrays["model.weight"]
        self.momentum = arrays.get("optimizer.momentum", self.momentum)


class Pickled(Mechanism):
    """Overwrites in place, checks nothing, and runs whatever it reads."""

    key, title, suffix = "pickled", "pickle in place", ".pkl"
    subject: FakeTraining

    def write(self, target: Path) -> None:
        target.write_bytes(pickle.dumps(self.subject.arrays(self.weights_only)))

    def load(self) -> None:
        self.subject.put(pickle.loads(self.path.read_bytes()))


class Checked(Mechanism):
    """One array after the other behind a checksum, written beside and renamed."""

    key, title, suffix = "checked", "checked and atomic", ".bin"
    subject: FakeTraining

    def write(self, target: Path) -> None:
        data = b"".join(array.tobytes() for array in self.subject.arrays(self.weights_only).values())
        beside = target.with_suffix(".new")
        beside.write_bytes(zlib.crc32(data).to_bytes(4, "little") + data)
        beside.rename(target)

    def load(self) -> None:
        self.subject.put({name: self._read(index) for index, name in enumerate(self._names)})

    def read_part(self, name: str) -> NDArray[Any]:
        return self._read(self._names.index(f"model.{name}"))

    @property
    def _names(self) -> list[str]:
        return list(self.subject.arrays(self.weights_only))

    def _read(self, index: int) -> NDArray[Any]:
        stored = self.path.read_bytes()
        data = stored[4:]
        if zlib.crc32(data) != int.from_bytes(stored[:4], "little"):
            raise ValueError("the checksum is wrong")
        size = self.subject.weight.nbytes
        return np.frombuffer(data[index * size : (index + 1) * size], np.float32).reshape(64, 64).copy()


class FakeProbe(Probe):
    ingredients: ClassVar[Mapping[str, str]] = {"rng": "random numbers", "momentum": "momentum"}

    def __init__(self, seed: int) -> None:
        self.training = FakeTraining(seed)
        self.rng = np.random.default_rng(seed)

    def step(self) -> float:
        self.training.weight += self.rng.standard_normal((64, 64)).astype(np.float32)
        return self.training.step()

    def weights(self) -> Arrays:
        return {"weight": self.training.weight.copy()}

    def capture(self) -> dict[str, Any]:
        state = {"weights": self.training.weight.copy(), "momentum": self.training.momentum.copy()}
        return {**state, "rng": self.rng.bit_generator.state}

    def restore(self, captured: Mapping[str, Any]) -> None:
        self.training.weight = captured["weights"]
        self.training.momentum = captured.get("momentum", self.training.momentum)
        if "rng" in captured:
            self.rng.bit_generator.state = captured["rng"]


class Forgetful(DefaultCheckpoint):
    """Saves everything but the random numbers."""

    key, title = "forgetful", "weights and momentum"

    def save(self, probe: Any, directory: Path) -> None:
        found = {name: value for name, value in probe.capture().items() if name != "rng"}
        (directory / "state.pkl").write_bytes(pickle.dumps(found))

    def load(self, probe: Any, directory: Path) -> None:
        probe.restore(pickle.loads((directory / "state.pkl").read_bytes()))


class Crashing(Pickled):
    key, title = "crashing", "ends the process"

    def write(self, target: Path) -> None:
        os._exit(7)


class Hanging(Pickled):
    key, title = "hanging", "never returns"

    def write(self, target: Path) -> None:
        time.sleep(600)


class Raising(Pickled):
    key, title = "raising", "raises"

    def write(self, target: Path) -> None:
        raise OSError("the disk is on fire")


class NotInstalled(Pickled):
    key, title = "absent", "not installed"

    @classmethod
    def missing(cls) -> str | None:
        return "pip install absent"


class Wrong(Pickled):
    """Loads something else than it saved."""

    key, title = "wrong", "restores nothing"

    def load(self) -> None:
        self.subject.step()


def unbuildable(model: str, quick: bool, seed: int) -> FakeTraining:
    raise NotImplementedError("no such layer")


FAKE = Framework(
    packages={"fake": "numpy"},
    training=lambda model, quick, seed: FakeTraining(seed),
    mechanisms=(Pickled, Checked),
    probe=FakeProbe,
    defaults=(Forgetful,),
)
_TROUBLES = {
    "1": replace(FAKE, mechanisms=(Crashing, Hanging, Raising, NotInstalled, Wrong, Checked)),
    "build": replace(FAKE, training=unbuildable),
    "hanging": replace(FAKE, mechanisms=(Hanging,)),
}
FRAMEWORK = _TROUBLES.get(os.environ.get("FAKE_TROUBLES", ""), FAKE)
