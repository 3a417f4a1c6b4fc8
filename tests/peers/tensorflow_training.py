"""A training loop of TensorFlow's own kind, in its environment. Called by `test_tensorflow.py`.

exact FOLDER STEP...    whole, and killed when each step is durable and then resumed; one JSON line each
objects FOLDER          all kinds of objects, saved, changed, and restored; what must be refused
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import traceback
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import everystep
from everystep.integrations.tensorflow import state_of

STEPS = 12


def model_of(width: int = 8) -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(width),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def train(run: str, kill: int = 0) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    model, optimizer = model_of()
    x = np.random.RandomState(0).rand(20, 4).astype("float32")
    batches = iter(tf.data.Dataset.from_tensor_slices(x).shuffle(20, seed=3).repeat().batch(4).prefetch(2))
    noise = tf.random.Generator.from_seed(4)

    @tf.function
    def step(batch: Any, more: Any) -> Any:
        with tf.GradientTape() as tape:
            inputs = batch + 0.1 * noise.normal(tf.shape(batch)) + more
            loss = tf.reduce_mean(
                (model(inputs, training=True) - tf.reduce_sum(batch, 1, keepdims=True)) ** 2
            )
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, batches=batches, noise=noise)
    losses: list[float] = []
    with everystep.Checkpointer(run, state_of(checkpoint, losses=losses), mode="snapshot") as ckpt:
        for done in range(ckpt.restore(), STEPS):
            if kill and done == kill:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(float(step(next(batches), tf.random.uniform([]))))
            ckpt.save(done + 1)
    digest = hashlib.sha256(repr((losses, random.random(), np.random.rand())).encode())
    for variable in (*model.variables, *optimizer.variables):
        digest.update(variable.numpy().tobytes())
    return {"step": len(losses), "digest": digest.hexdigest(), "losses": losses}


def in_child(run: str, kill: int = 0) -> None:
    """A process of its own, without the seconds that importing takes."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            print("\n" + json.dumps(train(run, kill)), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(pid, 0)


def exact(folder: str, steps: list[int]) -> None:
    in_child(f"{folder}/whole")
    for step in steps:
        in_child(f"{folder}/{step}", step)
        in_child(f"{folder}/{step}")


class Notes(tf.train.experimental.PythonState):
    def __init__(self) -> None:
        self.text = "before"

    def serialize(self) -> str:
        return self.text

    def deserialize(self, string_value: bytes) -> None:
        self.text = string_value.decode()


class Everything(tf.Module):
    def __init__(self, length: int = 3) -> None:
        super().__init__()
        kinds = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
        self.kinds = {
            name: tf.Variable(np.array([0, 1, 3][:length]).astype(tf.as_dtype(name).as_numpy_dtype))
            for name in [*kinds.split(), "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]
        }
        self.words = tf.Variable(["a", "bc"])
        self.growing = tf.Variable([1.0], shape=[None])
        self.lists = [tf.Variable(2.0), {"x": tf.Variable(3.0)}]
        self.again = self.lists[0]
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        self.notes = Notes()
        self.random = tf.random.Generator.from_seed(1)


def objects(folder: str) -> None:
    tf.random.set_seed(5)
    things = Everything()
    things.table.insert(["one"], [1])
    things.growing.assign([1.0, 2.0])
    state = state_of(tf.train.Checkpoint(things=things))
    wanted = {name: np.asarray(variable.numpy()).tolist() for name, variable in things.kinds.items()}
    everystep.save(f"{folder}/first", state, step=3)
    with everystep.open(f"{folder}/first") as opened:
        assert opened.step == 3
        assert "objects.things.kinds.bfloat16" in opened, list(opened)
        once = [name for name in opened if "again" in name or "lists" in name]
        assert once == ["objects.things.again", "objects.things.lists.1.x"], once
    drawn = (
        things.random.normal([2]).numpy().tolist(),
        tf.random.uniform([2]).numpy().tolist(),
        random.random(),
    )

    for variable in things.kinds.values():
        variable.assign(np.zeros(3, variable.dtype.as_numpy_dtype))
    things.words.assign(["x", "y"])
    things.growing.assign([0.0])
    things.lists[1]["x"].assign(9.0)
    things.table.insert(["two", "one"], [2, 5])
    things.notes.text = "after"
    everystep.load(f"{folder}/first", into=state)
    assert {name: np.asarray(variable.numpy()).tolist() for name, variable in things.kinds.items()} == wanted
    assert things.words.numpy().tolist() == [b"a", b"bc"]
    assert things.growing.numpy().tolist() == [1.0, 2.0]
    assert things.lists[1]["x"].numpy() == 3.0
    assert things.table.lookup(["one", "two"]).numpy().tolist() == [1, -1]
    assert things.notes.text == "before"
    again = (
        things.random.normal([2]).numpy().tolist(),
        tf.random.uniform([2]).numpy().tolist(),
        random.random(),
    )
    assert again == drawn, (again, drawn)

    # Another object tree, or other shapes: nothing is changed.
    def load(root: Any) -> None:
        everystep.load(f"{folder}/first", into=state_of(tf.train.Checkpoint(things=root)))

    refused("things.kinds.int8: checkpoint int8(3,), target int8(2,)", lambda: load(Everything(2)))
    other = Everything()
    other.more = tf.Variable(7.0)
    other.lists[0].assign(5.0)
    refused("missing from the checkpoint (1):\n    things.more", lambda: load(other))
    assert other.lists[0].numpy() == 5.0
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        mirrored = tf.Variable(1.0)
    refused("does not support MirroredVariable", lambda: load(mirrored))
    static = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0)
    everystep.save(
        f"{folder}/static", state_of(tf.train.Checkpoint(static=static))
    )  # as TensorFlow: it is constant
    refused("entries of these names itself: rng", lambda: state_of(things, rng=1))
    print("objects: ok")


def refused(text: str, call: Any) -> None:
    said = ""
    try:
        call()
    except (ValueError, everystep.EverystepError) as error:
        said = str(error)
    assert text in said, said


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    if command == "exact":
        exact(place, list(map(int, rest)))
    else:
        objects(place)
