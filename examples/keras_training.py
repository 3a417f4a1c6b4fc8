"""Keras, with a checkpoint after every batch. Needs keras and a backend: pip install 'everystep[keras]'

    KERAS_BACKEND=jax python examples/keras_training.py runs/keras     # or tensorflow, or torch

Stop it at any moment (Ctrl-C, kill -9) and start it again: it ends with the same bits as if never stopped.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np

from everystep.integrations.keras import Batches, EverystepCallback


def main(run: str, epochs: int) -> None:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.AdamW(1e-2), "mse", metrics=["mae"])
    x = np.random.RandomState(1).randn(256, 16).astype("float32")
    data = Batches(x, x.sum(1, keepdims=True), batch_size=16, seed=2)
    model.fit(
        data,
        epochs=epochs,
        shuffle=False,  # `Batches` has shuffled
        verbose=2,
        callbacks=[EverystepCallback(run, data=data)],  # the one line
    )
    total = sum(float(keras.ops.sum(variable)) for variable in model.trainable_variables)
    print(f"step {int(model.optimizer.iterations)}: weights sum to {total}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/keras")
    parser.add_argument("--epochs", type=int, default=2)
    main(**vars(parser.parse_args()))
