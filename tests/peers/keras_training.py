"""Trainings with Keras, in an environment of its own. Called by `test_keras_training.py`.

exact FOLDER DATA STEP...   whole, and killed when each step is durable and then resumed; one JSON line each
faults FOLDER               what must be refused, and small promises
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sys
import traceback
import warnings
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import everystep
from everystep.integrations.keras import Batches, EverystepCallback, load_weights

EPOCHS = 3
BATCHES = 5


class Noise(keras.layers.Layer):
    """Random numbers of Keras's global generator, where the backend allows them."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training and keras.backend.backend() != "jax":
            x = x + 0.1 * keras.random.normal(keras.ops.shape(x))
        return x


def model_of(width: int = 16, **compiling: Any) -> Any:
    """Everything that an inexact resume would change: dropout, statistics, noise, slots, metrics."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(width, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            Noise(),
            layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-2, use_ema=True, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse", metrics=["mae"], **compiling)
    return model


class Kill(keras.callbacks.Callback):
    def __init__(self, everystep_callback: EverystepCallback, step: int) -> None:
        super().__init__()
        self._of, self._step = everystep_callback, step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._step and self._of._step == self._step:
            self._of.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)


class Shuffling(keras.utils.PyDataset):
    """A dataset of the user's, whose order depends on the epochs before: it brings its own state."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._x, self._y, self.order = x, y, np.arange(len(x))

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        chosen = self.order[index * 4 : index * 4 + 4]
        return self._x[chosen], self._y[chosen]


def data_of(kind: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """What `fit` is given, and what the callback is."""
    source = np.random.RandomState(7)
    x = source.rand(4 * BATCHES, 8).astype("float32")
    y = x.sum(1, keepdims=True)
    if kind == "batches":
        batches = Batches(x, y, batch_size=4, seed=3)
        return batches, {}, {"data": batches}
    if kind == "arrays":
        return x, {"y": y, "batch_size": 4}, {}
    if kind == "ordered":
        return x, {"y": y, "batch_size": 4, "shuffle": False}, {}
    if kind == "dataset":  # in batches that Keras shuffles
        return Shuffling(x, y), {}, {}
    if kind == "tf.data":
        import tensorflow as tf

        tensors = tf.data.Dataset.from_tensor_slices((x, y))
        return tensors.shuffle(20, seed=5, reshuffle_each_iteration=False).batch(4), {}, {}
    raise ValueError(kind)


def digest_of(model: Any) -> str:
    digest = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        digest.update(variable.path.encode() + keras.ops.convert_to_numpy(variable.value).tobytes())
    digest.update(
        repr(
            (
                random.random(),
                np.random.rand(),
                keras.ops.convert_to_numpy(keras.random.normal((2,))).tolist(),
            )
        ).encode()
    )
    return digest.hexdigest()


def train(run: str, kind: str, kill: int = 0, **compiling: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    model = model_of(**compiling)
    data, arguments, known = data_of(kind)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0)
    stopping = keras.callbacks.EarlyStopping("loss", patience=10)
    ours = EverystepCallback(run, remember=[plateau, stopping], keep=everystep.Keep(last=100), **known)
    history = model.fit(
        data,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[ours, plateau, stopping, Kill(ours, kill)],
        validation_data=(np.ones((4, 8)), np.ones((4, 1))),
        **arguments,
    )
    return {
        "step": ours._step,
        "digest": digest_of(model),
        "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
        "waited": stopping.wait,
        "history": {name: list(map(float, values)) for name, values in history.history.items()},
    }


def in_child(run: str, kind: str, kill: int = 0, **compiling: Any) -> None:
    """A process of its own, without the seconds that importing takes."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            print("\n" + json.dumps(train(run, kind, kill, **compiling)), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(pid, 0)


def exact(folder: str, kind: str, steps: list[int]) -> None:
    kind, _, each = kind.partition("+")  # batches+2: two in one call of the train function
    compiling = {"steps_per_execution": int(each), "jit_compile": True} if each else {}
    in_child(f"{folder}/whole", kind, **compiling)
    for step in steps:
        in_child(f"{folder}/{step}", kind, step, **compiling)
        in_child(f"{folder}/{step}", kind, **compiling)


def small(run: str, model: Any, epochs: int = 1, callbacks: Any = (), **options: Any) -> EverystepCallback:
    data, _, known = data_of("batches")
    ours = EverystepCallback(run, **known, **options)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[ours, *callbacks])
    return ours


def faults(folder: str) -> None:
    keras.utils.set_random_seed(1)
    model = model_of()
    ours = small(f"{folder}/run", model, every=2)
    assert ours.checkpointer is None
    with everystep.open(f"{folder}/run") as opened:
        assert opened.step == 4

    # A second fit goes on with the run; one with more epochs trains them.
    assert small(f"{folder}/run", model, epochs=1)._step == 5
    assert small(f"{folder}/run", model, epochs=2)._step == 10
    assert model._initial_epoch is None

    # Weights alone, and another model.
    loaded = model_of()
    load_weights(loaded, f"{folder}/run")
    for one, other in zip(loaded.weights, model.weights, strict=True):
        assert np.array_equal(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other)), one.path
    refused("dense.kernel", lambda: small(f"{folder}/run", model_of(width=17), epochs=3))
    refused("batches per epoch|samples in the dataset|batch_size", lambda: other_data(f"{folder}/run"))
    small(f"{folder}/run", model_of(), epochs=3)  # a failure leaves the run free

    assert small(f"{folder}/run", model_of(), start_over=True)._step == 5

    # An error in fit leaves the callback usable, and the training goes on where it was.
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise RuntimeError("on purpose")

    keras.utils.set_random_seed(1)
    data, _, known = data_of("batches")
    callback = EverystepCallback(f"{folder}/fails", **known)
    failing = model_of()
    refused("on purpose", lambda: failing.fit(data, epochs=1, verbose=0, callbacks=[callback, Fails()]))
    failing.fit(data, epochs=1, verbose=0, callbacks=[callback])
    keras.utils.set_random_seed(1)
    assert callback._step == 5

    # A signal that asks the process to end: the batch is saved first.
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    ended = EverystepCallback(f"{folder}/ends", every=100, **known)
    code = None
    try:
        model_of().fit(data, verbose=0, callbacks=[ended, Ends()])
    except SystemExit as error:
        code = error.code
    assert code == 0
    with everystep.open(f"{folder}/ends") as opened:
        assert opened.step == 3
    del opened
    assert small(f"{folder}/ends", model_of())._step == 5

    # A training that a callback has ended stays ended.
    stopping = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100.0)
    assert small(f"{folder}/stop", model_of(), epochs=5, callbacks=[stopping])._step == 10
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert small(f"{folder}/stop", model_of(), epochs=5)._step == 10
    assert any("has ended this training" in str(warning.message) for warning in caught)

    # A run that is complete says so, since fit then trains nothing.
    assert small(f"{folder}/whole", model_of(), epochs=2)._step == 10
    told("has completed all 2 epochs", lambda: small(f"{folder}/whole", model_of(), epochs=2))
    told("has completed all 2 epochs", lambda: small(f"{folder}/whole", model_of(), epochs=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert small(f"{folder}/whole", model_of(), epochs=3)._step == 15

    # Weights, and variables of an optimizer, that have no given names. Keras counts them through the process.
    unnamed = EverystepCallback(f"{folder}/unnamed")
    x = np.ones((20, 8), "float32")
    for epochs in (1, 2):
        model = keras.Sequential([keras.Input((8,)), Unnamed(), Unnamed(), keras.layers.Dense(1)])
        model.compile(Counting(1e-2), "mse")
        model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=[unnamed])
    with everystep.open(f"{folder}/unnamed") as opened:
        assert {
            "model.sequential.unnamed.variable",
            "model.sequential.unnamed.variable_1",
            "model.sequential.unnamed_1.variable",
        } <= set(opened)
        assert "optimizer.variable" in opened
    assert unnamed._step == 10

    # Fewer data than had been seen.
    x = np.zeros((20, 8), "float32")
    run = EverystepCallback(f"{folder}/short")
    refused(
        "on purpose", lambda: model_of().fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[run, Fails()])
    )
    run.close()
    refused(
        "after 2 batches of epoch 0, but the data have 1",
        lambda: model_of().fit(x[:4], x[:4, :1], batch_size=4, verbose=0, callbacks=[run]),
    )
    run.close()

    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    if keras.backend.backend() == "tensorflow":  # the others build it
        refused("that is built", lambda: small(f"{folder}/unbuilt", unbuilt))
    print("faults: ok")


class Unnamed(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, x: Any) -> Any:
        return x * self.scale + self.shift


class Counting(keras.optimizers.SGD):
    def build(self, variables: Any) -> None:
        super().build(variables)
        self.count = self.add_variable(shape=(), initializer="zeros", name=None)


def told(text: str, call: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    said = [str(warning.message) for warning in caught]
    assert any(text in one for one in said), said


def other_data(run: str) -> None:
    data = Batches(np.zeros((12, 8)), np.zeros((12, 1)), batch_size=4)
    model_of().fit(data, epochs=3, verbose=0, callbacks=[EverystepCallback(run, data=data)])


def refused(text: str, call: Any) -> None:
    said = ""
    try:
        call()
    except (ValueError, RuntimeError, everystep.EverystepError) as error:
        said = str(error)
    assert re.search(text, said), said


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    warnings.filterwarnings("ignore")
    if command == "exact":
        exact(place, rest[0], list(map(int, rest[1:])))
    else:
        faults(place)
