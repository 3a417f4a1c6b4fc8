"""TensorFlow in the suite ``determinism``: a small training with all kinds of state, usual checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from everystep_study.frameworks.api import (
    Arrays,
    DefaultCheckpoint,
    EverystepDefault,
    Images,
    Probe,
    capture_random,
    restore_random,
)

_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class TensorFlowProbe(Probe):
    ingredients: ClassVar[Mapping[str, str]] = {
        "seeds": "Keras' seeds (dropout)",
        "numpy_rng": "numpy's random numbers (noise on images)",
        "python_rng": "Python's random numbers (mirrored images)",
        "optimizer": "optimizer (momentum, learning rate)",
        "step": "step (the schedule of the learning rate)",
        "data": "position in the shuffled data",
        "statistics": "statistics of BatchNorm",
    }

    def __init__(self, seed: int) -> None:
        keras.utils.clear_session()
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((8, 8, 3))
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(layers.Conv2D(8, 3)(inputs)))
        x = layers.Dense(10)(layers.Flatten()(layers.Dropout(0.3)(x)))
        model = keras.Model(inputs, x)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), _LOSS)
        self.count = 0
        self.data = Images(seed, channels_first=False)
        self.adopt(model)

    def adopt(self, model: Any) -> None:
        self.model, self.optimizer = model, model.optimizer
        self.optimizer.build(model.trainable_variables)
        self._train = tf.function(self._train_once)

    def _train_once(self, images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _LOSS(labels, self.model(images, training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return loss

    def step(self) -> float:
        """The loss of the step, and that of a validation, which sees the statistics of BatchNorm."""
        images, labels = self.data.take()
        self.optimizer.learning_rate.assign(0.05 * 0.7 ** (self.count // 3))
        loss = self._train(tf.constant(images), tf.constant(labels))
        self.count += 1
        images, labels = self.data.seen
        return float(loss) + float(_LOSS(labels, self.model(images, training=False)))

    def _groups(self) -> dict[str, list[Any]]:
        trained = self.model.trainable_variables
        others = [v for v in self.model.variables if all(v is not t for t in trained)]
        return {
            "weights": trained,
            "seeds": [v for v in others if "seed" in v.path],
            "statistics": [v for v in others if "seed" not in v.path],
            "optimizer": self.optimizer.variables,
        }

    def weights(self) -> Arrays:
        groups = self._groups()
        return {v.path: np.array(v.numpy()) for name in ("weights", "statistics") for v in groups[name]}

    def capture(self) -> dict[str, Any]:
        arrays = {name: [np.array(v.numpy()) for v in group] for name, group in self._groups().items()}
        return {**arrays, **capture_random(), "step": self.count, "data": self.data.state_dict()}

    def restore(self, captured: Mapping[str, Any]) -> None:
        for name, group in self._groups().items():
            for variable, value in zip(group, captured.get(name, ()), strict=name in captured):
                variable.assign(value)
        self.count = captured.get("step", self.count)
        if "data" in captured:
            self.data.load_state_dict(captured["data"])
        restore_random(captured)


class WholeModel(DefaultCheckpoint):
    """Keras' guide: `model.save`, and `load_model`."""

    key, title = "keras", "model.save, .keras"

    def save(self, probe: TensorFlowProbe, directory: Path) -> None:
        probe.model.save(directory / "model.keras")

    def load(self, probe: TensorFlowProbe, directory: Path) -> None:
        probe.adopt(keras.saving.load_model(directory / "model.keras"))


class CheckpointOfBoth(DefaultCheckpoint):
    """TensorFlow's guide to checkpoints: `tf.train.Checkpoint` of step, optimizer and model."""

    key, title = "tf-checkpoint", "tf.train.Checkpoint, as in the guide"

    def save(self, probe: TensorFlowProbe, directory: Path) -> None:
        step = tf.Variable(probe.count)
        tf.train.Checkpoint(step=step, optimizer=probe.optimizer, model=probe.model).write(
            str(directory / "ckpt")
        )

    def load(self, probe: TensorFlowProbe, directory: Path) -> None:
        step = tf.Variable(0)
        tf.train.Checkpoint(step=step, optimizer=probe.optimizer, model=probe.model).read(
            str(directory / "ckpt")
        )
        probe.count = int(step.numpy())


def missing_integration() -> str | None:
    try:
        import everystep.integrations.tensorflow  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


class EverystepObjects(EverystepDefault):
    """`everystep.integrations.tensorflow.state_of` the same objects, and the position in the data."""

    mode = "snapshot"

    @classmethod
    def missing(cls) -> str | None:
        return missing_integration()

    def state(self, probe: TensorFlowProbe) -> Any:
        from everystep.integrations.tensorflow import state_of

        objects = tf.train.Checkpoint(optimizer=probe.optimizer, model=probe.model)
        return state_of(objects, data=probe.data, loop=_Loop(probe))


class _Loop:
    """The number of steps, as objects with `state_dict` have it."""

    def __init__(self, probe: TensorFlowProbe) -> None:
        self._probe = probe

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._probe.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._probe.count = state["step"]
