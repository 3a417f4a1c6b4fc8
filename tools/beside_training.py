"""Runs the tests several times beside a training that saves every step; stops when they fail.

    .venv/bin/python tools/beside_training.py [--times 10] [arguments for tools/run_tests.py]

Tests that depend on how fast the machine is fail here sooner or later; `run_tests` says which, and keeps
their output. The training is that of ``examples/demo``. It ends with this program, and by itself after some
hours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOURS = 6
TRAINING = Path(__file__).parents[1] / "examples" / "demo" / "train.py"
RUN_TESTS = Path(__file__).with_name("run_tests.py")


@contextmanager
def training() -> Iterator[subprocess.Popen[bytes]]:
    """A training that saves every step, while the block lasts."""
    with tempfile.TemporaryDirectory(prefix="beside-training-") as place:
        command = [sys.executable, str(TRAINING), os.path.join(place, "run"), "--steps", str(10**9)]
        # Asked to end, it finishes its step and its save; `timeout` hands that on to it.
        limited = ["timeout", "--kill-after=60", str(HOURS * 3600), *command]
        with open(os.path.join(place, "output.txt"), "wb") as output:
            process = subprocess.Popen(limited, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
            if process.poll() is not None:
                told = Path(place, "output.txt").read_text(errors="replace")
                raise RuntimeError(f"the training has ended by itself:\n{told[-4000:]}")
        finally:
            process.terminate()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="runs that must pass one after the other")
    options, rest = parser.parse_known_args()
    with training():
        for number in range(1, options.times + 1):
            code = subprocess.run([sys.executable, str(RUN_TESTS), *rest]).returncode
            print(f"run {number} of {options.times}: {'passed' if code == 0 else 'failed'}", flush=True)
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
