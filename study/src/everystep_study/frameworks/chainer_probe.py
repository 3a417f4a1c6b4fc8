"""Chainer in the suite ``determinism``: a trainer with all kinds of state, its snapshot and Everystep's."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import serializers, training
from chainer.training import extensions

from everystep_study.frameworks.api import Arrays, DefaultCheckpoint, Probe, capture_random, restore_random

SAMPLES, BATCH = 40, 8


class _Model(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3)
            self.norm = L.BatchNormalization(8)
            self.out = L.Linear(288, 10)

    def forward(self, images: Any, labels: Any) -> Any:
        if chainer.config.train:
            if random.random() < 0.5:
                images = images[:, :, :, ::-1]
            images = (images + 0.1 * np.random.standard_normal(images.shape)).astype(np.float32)
        found = self.out(F.dropout(F.relu(self.norm(self.conv(images))), 0.3))
        return F.softmax_cross_entropy(found, labels)


class ChainerProbe(Probe):
    ingredients: ClassVar[Mapping[str, str]] = {
        "numpy_rng": "numpy's random numbers (dropout, noise, order)",
        "python_rng": "Python's random numbers (mirrored images)",
        "momentum": "optimizer (momentum)",
        "rate": "learning rate, which an extension lowers",
        "data": "position in the shuffled data",
        "statistics": "statistics of BatchNorm",
    }

    def __init__(self, seed: int) -> None:
        data = np.random.RandomState(1234)  # the data are the same for all
        images = data.standard_normal((SAMPLES, 3, 8, 8)).astype(np.float32)
        labels = data.randint(10, size=SAMPLES).astype(np.int32)
        self._seen = images[:BATCH], labels[:BATCH]
        np.random.seed(seed)
        random.seed(seed)
        self.model = _Model()
        self.optimizer = chainer.optimizers.MomentumSGD(0.05, 0.9).setup(self.model)
        self.iterator = chainer.iterators.SerialIterator(list(zip(images, labels, strict=True)), BATCH)
        self.updater = training.updaters.StandardUpdater(self.iterator, self.optimizer)
        self.trainer = training.Trainer(self.updater, (1000, "iteration"))
        self.shift = extensions.ExponentialShift("lr", 0.7)
        self.trainer.extend(self.shift, name="shift", trigger=(3, "iteration"))
        self.shift.initialize(self.trainer)
        self.trainer._start_at = 0.0  # it is never run, and serializes only if it was

    def step(self) -> float:
        """The loss of a validation after the step, which sees weights and statistics."""
        self.updater.update()
        if self.updater.iteration % 3 == 0:
            self.shift(self.trainer)
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return float(self.model(*self._seen).array)

    def weights(self) -> Arrays:
        found = {name: parameter.array.copy() for name, parameter in self.model.namedparams()}
        return {**found, **self._statistics()}

    def _statistics(self) -> dict[str, Any]:
        norm = self.model.norm
        return {"avg_mean": norm.avg_mean.copy(), "avg_var": norm.avg_var.copy(), "N": np.array(norm.N)}

    def _states(self) -> dict[str, dict[str, Any]]:
        return {name: parameter.update_rule.state for name, parameter in self.model.namedparams()}

    def capture(self) -> dict[str, Any]:
        serial = serializers.DictionarySerializer()
        self.iterator.serialize(serial)
        momentum = {name: state and dict(state) for name, state in self._states().items()}
        return copy.deepcopy(
            {
                "weights": {name: parameter.array for name, parameter in self.model.namedparams()},
                "statistics": self._statistics(),
                "momentum": {"states": momentum, "t": self.optimizer.t},
                "rate": {"lr": self.optimizer.lr, "t": self.shift._t, "last": self.shift._last_value},
                "data": {"iterator": serial.target, "iteration": self.updater.iteration},
                **capture_random(),
            }
        )

    def restore(self, captured: Mapping[str, Any]) -> None:
        for name, parameter in self.model.namedparams():
            parameter.array[...] = captured["weights"][name]
            if "momentum" in captured:
                rule = parameter.update_rule
                rule._state = captured["momentum"]["states"][name]
        if "momentum" in captured:
            self.optimizer.t = captured["momentum"]["t"]
        if "statistics" in captured:
            for name in ("avg_mean", "avg_var"):
                getattr(self.model.norm, name)[...] = captured["statistics"][name]
            self.model.norm.N = int(captured["statistics"]["N"])
        if "rate" in captured:
            rate = captured["rate"]
            self.optimizer.lr, self.shift._t, self.shift._last_value = rate["lr"], rate["t"], rate["last"]
        if "data" in captured:
            self.iterator.serialize(serializers.NpzDeserializer(captured["data"]["iterator"]))
            self.updater.iteration = captured["data"]["iteration"]
        restore_random(captured)


class TrainerSnapshot(DefaultCheckpoint):
    """What the extension `snapshot` writes: the whole trainer as npz."""

    key, title = "snapshot", "snapshot of the trainer"

    def save(self, probe: ChainerProbe, directory: Path) -> None:
        serializers.save_npz(str(directory / "snapshot.npz"), probe.trainer)

    def load(self, probe: ChainerProbe, directory: Path) -> None:
        serializers.load_npz(str(directory / "snapshot.npz"), probe.trainer)
        probe.shift.initialize(probe.trainer)  # as `Trainer.run` does


class EverystepSnapshot(DefaultCheckpoint):
    """`everystep.integrations.chainer.snapshot`."""

    key, title, ours = "everystep", "Everystep's snapshot", True

    def save(self, probe: ChainerProbe, directory: Path) -> None:
        extension = self._extension(probe, directory)
        extension(probe.trainer)
        extension.finalize()

    def load(self, probe: ChainerProbe, directory: Path) -> None:
        self._extension(probe, directory).finalize()

    def _extension(self, probe: ChainerProbe, directory: Path) -> Any:
        from everystep.integrations.chainer import snapshot

        extension = snapshot(directory / "run", preemption=False)
        extension.initialize(probe.trainer)
        return extension
