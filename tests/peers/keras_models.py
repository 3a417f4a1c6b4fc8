"""Runs in the environment of Keras: trains a tiny model and saves it in all of Keras' formats.

python keras_models.py FOLDER DTYPE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3, dtype=sys.argv[2]),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
model.fit(np.ones((8, 6)), np.zeros((8, 3)), batch_size=4, epochs=1, verbose=0)
model.save(folder / "m.keras")
model.save_weights(folder / "m.weights.h5")
model.save(folder / "m.h5")
arrays = [np.asarray(variable) for variable in model.weights]
np.savez(folder / "weights.npz", *arrays)
np.savez(folder / "optimizer.npz", *[np.asarray(variable) for variable in model.optimizer.variables])
