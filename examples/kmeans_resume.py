"""KMeans that is killed in the middle of its fit, twice, and goes on as if nothing had happened.

python examples/kmeans_resume.py
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # with many threads, scikit-learn's own sums differ from run to run

import subprocess
import sys
import tempfile
import time

import numpy as np
import sklearn.cluster

import everystep
from everystep.integrations.sklearn import KMeans

X = np.random.default_rng(0).normal(size=(4_000, 32))
PARAMETERS = {"n_clusters": 12, "n_init": 3, "random_state": 0, "tol": 0.0, "max_iter": 60}


def place(path: str) -> tuple[int, int]:
    """How far the fit on the shelf is: runs and iterations. Readers never meet half of a commit."""
    try:
        with everystep.Shelf(path, mode="r") as shelf:
            run, iteration = shelf.get("fit.place", (0, 0))
            return run, iteration or 0
    except everystep.errors.ShelfNotFound:
        return 0, 0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/fit.shelf"
        for target in ((0, 8), (1, 8)):
            child = subprocess.Popen([sys.executable, __file__, path])
            while place(path) < target and child.poll() is None:
                time.sleep(0.001)
            child.kill()  # SIGKILL: no exception, no clean-up
            child.wait()
            print("killed in run {} at iteration {}".format(*place(path)))
        resumed = KMeans(**PARAMETERS, shelf=path).fit(X)
    expected = sklearn.cluster.KMeans(**PARAMETERS).fit(X)
    assert resumed.cluster_centers_.tobytes() == expected.cluster_centers_.tobytes()
    assert (resumed.inertia_, resumed.n_iter_) == (expected.inertia_, expected.n_iter_)
    print(f"resumed; equal to an uninterrupted fit, bit for bit: inertia {resumed.inertia_:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        KMeans(**PARAMETERS, shelf=sys.argv[1]).fit(X)
    else:
        main()
