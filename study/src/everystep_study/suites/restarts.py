"""Restarts for ``everystep bench --training``: trainings that are killed, and timed until they go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from everystep_study import cache
from everystep_study.peers.base import files_below, missing_everystep, missing_modules
from everystep_study.results import SECONDS
from everystep_study.states import Gpt2
from everystep_study.suite import Case, Turn
from everystep_study.suites.training_child import Order, Ready, Stepped
from everystep_study.training_model import Load

CHILD_SECONDS = 180.0
"""A child that takes longer is killed, and its row is reported as failed."""
CHILD_STEPS = 2
"""Per life: enough that a kill after the last of them finds a checkpoint of the one before."""


class Restart(Case):
    """A training that is killed without warning, started again, and timed until its next step has ended.

    What a killed process wrote through the page cache is still there when it starts again on the same
    machine, but not on another one or after a power cut. Everystep reads past the cache, so `torch.load` is
    shown both ways: with its file in memory, and with its file forgotten.
    """

    sections = ("restart",)

    def __init__(self, key: str, title: str, shape: Gpt2, load: Load) -> None:
        self.key, self.title = key, title
        self._system = "overlap" if key == "everystep" else "torch"
        self._cold = key != "torch-cached"
        self._shape, self._load = shape, load
        self._last_step = 0

    def missing(self) -> str | None:
        return missing_modules("torch") or (missing_everystep() if self.key == "everystep" else None)

    def setup(self, directory: Path) -> None:
        self._directory = directory / "kept"
        self._directory.mkdir()

    def measure(self, turn: Turn) -> None:
        os.sync()
        for file in files_below(self._directory) if self._cold else ():
            cache.forget(file)
        batch, sequence = self._load.batch, self._load.sequence
        started, ready, steps = live(Order(str(self._directory), self._system, self._shape, batch, sequence))
        if self._last_step:
            if ready.completed == 0:
                raise RuntimeError(f"found no checkpoint after {self._last_step} steps")
            readings = {
                "import_seconds": ready.imported - started,
                "build_seconds": ready.built - ready.imported,
                "restore_seconds": ready.restored - ready.built,
                "step_seconds": steps[0].ended - ready.restored,
            }
            lost = max(0, self._last_step - ready.completed)  # killed between a save and the word of it: none
            turn.record("restart", readings | {SECONDS: sum(readings.values()), "lost": float(lost)})
        self._last_step = steps[-1].step


def live(order: Order) -> tuple[float, Ready, list[Stepped]]:
    """Starts a training, lets it take `CHILD_STEPS` steps, kills it; when it started and what it said."""
    command = [
        sys.executable,
        "-m",
        "everystep_study.suites.training_child",
        msgspec.json.encode(order).decode(),
    ]
    ready: Ready | None = None
    steps: list[Stepped] = []
    decoder = msgspec.json.Decoder(Ready | Stepped)
    started = time.monotonic()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        overdue = threading.Timer(CHILD_SECONDS, child.kill)
        overdue.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                # What it does until the kill reaches it counts as well; the last line may be half of one.
                if not line.endswith(b"\n"):
                    break
                match decoder.decode(line):
                    case Ready() as ready:
                        pass
                    case Stepped() as stepped:
                        steps.append(stepped)
                if len(steps) == CHILD_STEPS:
                    child.send_signal(signal.SIGKILL)
        finally:
            overdue.cancel()
            child.send_signal(signal.SIGKILL)
            child.wait()
        errors.seek(0)
        complaint = errors.read().decode(errors="replace").strip()
    if ready is None or len(steps) < CHILD_STEPS:
        last = complaint.splitlines()[-1] if complaint else "it said nothing"
        raise RuntimeError(f"the training ended by itself, or took over {CHILD_SECONDS:.0f} s: {last}")
    return started, ready, steps
