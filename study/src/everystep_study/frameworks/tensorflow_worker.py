"""TensorFlow and Keras 3 in the study: ``.keras``, HDF5, `tf.train.Checkpoint`, SavedModel, Everystep."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from everystep_study.frameworks import tensorflow_models
from everystep_study.frameworks.api import Arrays, Framework, Training
from everystep_study.frameworks.models import data, size_of
from everystep_study.frameworks.tensorflow_probe import (
    CheckpointOfBoth,
    EverystepObjects,
    TensorFlowProbe,
    WholeModel,
    missing_integration,
)
from everystep_study.mechanisms.mechanism import EverystepSnapshot, EverystepSync, Mechanism

_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class TensorFlowTraining(Training):
    def __init__(self, model: str, quick: bool, seed: int) -> None:
        keras.utils.clear_session()  # so that variables have the same names each time
        keras.utils.set_random_seed(seed)
        random.seed(seed)
        size = size_of(model, quick)
        self._inputs, self._targets = map(tf.constant, data(size, seed, channels_first=False))
        self.adopt(*tensorflow_models.build(size))
        self.model.compile(self.optimizer, _LOSS)
        self.step()

    def adopt(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        optimizer.build(model.trainable_variables)
        self.checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        # The same layers, not compiled: a compiled model brings its optimizer along.
        self.weights_checkpoint = tf.train.Checkpoint(model=keras.Model(model.inputs, model.outputs))
        self._train = tf.function(self._train_once)

    def _train_once(self) -> Any:
        with tf.GradientTape() as tape:
            loss = _LOSS(self._targets, self.model(self._inputs, training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return loss

    def step(self) -> float:
        return float(self._train())

    def tree(self, weights_only: bool = False) -> Any:
        return self.weights_checkpoint if weights_only else self.checkpoint

    def everystep_state(self, weights_only: bool) -> Any:
        from everystep.integrations.tensorflow import state_of

        return state_of(self.tree(weights_only))

    def weights(self) -> Arrays:
        return {variable.path: variable.numpy() for variable in _arrays(self.model.variables)}

    def optimizer_arrays(self) -> Arrays:
        return {variable.path: variable.numpy() for variable in _arrays(self.optimizer.variables)}

    def set_weights(self, arrays: Arrays) -> None:
        live = {variable.path: variable for variable in self.model.variables}
        for name, array in arrays.items():
            live[name].assign(array)


def _arrays(variables: Any) -> list[Any]:
    """Those with weights and momenta: seeds and counters are no part of all formats."""
    return [variable for variable in variables if len(variable.shape) and "seed" not in variable.path]


class KerasFile(Mechanism):
    """`model.save` of a compiled model into a ``.keras`` archive, with its optimizer."""

    key, title, suffix = "keras", "Keras, .keras", ".keras"
    weights_only_possible = False
    subject: TensorFlowTraining

    def write(self, target: Path) -> None:
        self.subject.model.save(target)

    def load(self) -> None:
        keras.utils.clear_session()
        found = keras.saving.load_model(self.path)
        self.subject.adopt(found, found.optimizer)

    def plant(self, marker: Path) -> bool:
        """A Lambda layer brings its own code."""
        code = f"lambda x: (__import__('os').makedirs({str(marker)!r}, exist_ok=True), x)[1]"
        evil = keras.Sequential([keras.Input((1,)), keras.layers.Lambda(eval(code))])
        evil.compile("sgd", "mse")
        evil.save(self.path)
        marker.rmdir()  # it ran while it was built
        return True


class WeightsHdf5(Mechanism):
    """`model.save_weights` into HDF5: of a compiled model with the optimizer's state, too."""

    key, title, suffix = "weights-h5", "Keras, HDF5 weights", ".weights.h5"
    weights_only_possible = False
    subject: TensorFlowTraining

    def write(self, target: Path) -> None:
        self.subject.model.save_weights(target, overwrite=True)

    def load(self) -> None:
        self.subject.model.load_weights(self.path)


class TrainCheckpoint(Mechanism):
    """`tf.train.Checkpoint.write` and `read`."""

    key, title = "tf-checkpoint", "tf.train.Checkpoint"
    subject: TensorFlowTraining

    def write(self, target: Path) -> None:
        target.mkdir(exist_ok=True)
        self.subject.tree(self.weights_only).write(str(target / "ckpt"))

    def load(self) -> None:
        self.subject.tree(self.weights_only).read(str(self.path / "ckpt")).assert_existing_objects_matched()

    def read_part(self, name: str) -> NDArray[Any]:
        """Its names are paths of objects; ours is found among those of the same shape."""
        wanted = self.subject.weights()[name]
        reader = tf.train.load_checkpoint(str(self.path / "ckpt"))
        for key, shape in reader.get_variable_to_shape_map().items():
            if tuple(shape) == wanted.shape:
                found = np.asarray(reader.get_tensor(key))
                if np.array_equal(found, wanted):
                    return found
        raise KeyError(name)


class SavedModel(Mechanism):
    """`model.export`: the graph and its variables, for serving; read back by `tf.saved_model.load`."""

    key, title = "saved-model", "SavedModel"
    optimizer_possible = False
    subject: TensorFlowTraining

    def write(self, target: Path) -> None:
        self.subject.model.export(target, verbose=False)

    def load(self) -> None:
        found = {variable.name.partition(":")[0]: variable for variable in self._loaded().variables}
        for variable in self.subject.model.variables:
            variable.assign(found[variable.path].numpy())

    def _loaded(self) -> Any:
        return tf.saved_model.load(str(self.path))


class TensorFlowSync(EverystepSync):
    """A `Checkpointer` of `everystep.integrations.tensorflow.state_of`."""

    subject: TensorFlowTraining

    @classmethod
    def missing(cls) -> str | None:
        return missing_integration()

    def read_part(self, name: str) -> NDArray[Any]:
        import everystep

        wanted = self.subject.weights()[name]
        with everystep.open(self.path) as checkpoint:
            for key, leaf in checkpoint.leaves.items():
                if key.startswith("objects.") and tuple(leaf.shape) == wanted.shape:
                    found = np.asarray(checkpoint[key][...])
                    if np.array_equal(found, wanted):
                        return found
        raise KeyError(name)


class TensorFlowSnapshot(TensorFlowSync, EverystepSnapshot):
    """As its documentation has it: variables are read in place, and written while the next steps run."""

    key, title, mode = EverystepSnapshot.key, EverystepSnapshot.title, EverystepSnapshot.mode
    background = True


FRAMEWORK = Framework(
    packages={"tensorflow": "tensorflow-cpu", "keras": "keras", "numpy": "numpy"},
    training=TensorFlowTraining,
    probe=TensorFlowProbe,
    mechanisms=(KerasFile, WeightsHdf5, TrainCheckpoint, SavedModel, TensorFlowSync, TensorFlowSnapshot),
    defaults=(WholeModel, CheckpointOfBoth, EverystepObjects),
)
