"""Save a small state, look into it, read a slice of it, and load it back. Needs only numpy.

python examples/save_and_load.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import everystep


def main() -> None:
    weights = np.arange(20_000, dtype=np.float32).reshape(200, 100)
    state = {"weights": weights, "epoch": 3, "schedule": ("cosine", 1e-3)}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"
        everystep.save(path, state)

        with everystep.open(path) as checkpoint:
            for name, leaf in checkpoint.leaves.items():
                print(name, leaf.dtype, leaf.shape)
            print("values:", checkpoint.values)
            print("two rows:", checkpoint["weights"][10:12].shape)

        loaded = everystep.load(path)
        assert loaded["schedule"] == ("cosine", 1e-3)
        assert np.array_equal(loaded["weights"], weights)
        print("loaded, and equal")


if __name__ == "__main__":
    main()
