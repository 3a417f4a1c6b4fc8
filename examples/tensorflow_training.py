"""A training loop in TensorFlow, durable after every step. Needs it: pip install 'everystep[tensorflow]'

    python examples/tensorflow_training.py runs/tensorflow

Stop it at any moment (Ctrl-C, kill -9) and start it again: it ends with the same bits as if never stopped.
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf

import everystep
from everystep.integrations.tensorflow import state_of


def main(run: str, steps: int) -> None:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.AdamW(1e-2)
    optimizer.build(model.trainable_variables)
    data = tf.data.Dataset.from_tensor_slices(tf.random.stateless_normal([256, 16], [1, 2]))
    batches = iter(data.shuffle(256, seed=2).repeat().batch(16))
    noise = tf.random.Generator.from_seed(4)

    @tf.function
    def train(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            found = model(batch + 0.01 * noise.normal(tf.shape(batch)), training=True)
            loss = tf.reduce_mean((found - tf.reduce_sum(batch, 1, keepdims=True)) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    objects = tf.train.Checkpoint(model=model, optimizer=optimizer, batches=batches, noise=noise)
    with everystep.Checkpointer(run, state_of(objects), mode="snapshot") as ckpt:
        for step in range(ckpt.restore(), steps):
            train(next(batches))
            ckpt.save(step + 1)
    total = sum(float(tf.reduce_sum(weight)) for weight in model.trainable_variables)
    print(f"step {steps}: weights sum to {total}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/tensorflow")
    parser.add_argument("--steps", type=int, default=32)
    main(**vars(parser.parse_args()))
