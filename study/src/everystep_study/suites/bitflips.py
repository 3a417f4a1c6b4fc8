"""The study's suite ``bitflips``: each bit position of a weight is flipped. Who notices, and when?

Training: the bit is flipped in some weights in memory, as a loader without checksums would bring them back,
and the loss is compared with that of a training without the flip. Loader: the same bit is flipped inside of
the files of a checkpoint, which is then loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystep_study.frameworks.process import FrameworkProcess
from everystep_study.suite import Case, Group, Turn
from everystep_study.suites.by_framework import FrameworkSuite, MechanismCase

BITS = 32
STEPS = 10
WEIGHTS = (1, 100)
_MODEL = "mlp"


class Trained(Case):
    """A training that goes on with flipped bits; every round draws other weights."""

    def __init__(self, process: FrameworkProcess, weights: int, seed: int) -> None:
        self.key = f"{weights}"
        self.title = f"{weights} flipped {'weight' if weights == 1 else 'weights'}"
        self.sections = ("training",)
        self._process, self._weights, self._seed = process, weights, seed

    def measure(self, turn: Turn) -> None:
        found = self._process.ask(
            "flip_and_train",
            bits=BITS,
            weights=self._weights,
            steps=STEPS,
            seed=self._seed,
            draw=self._seed + turn.round,
            directory=str(turn.directory),
        )
        readings = {"steps": float(STEPS), **found}
        noticed = [bit for bit in range(BITS) if readings[f"noticed_step, bit {bit}"]]
        broken = [bit for bit in range(BITS) if readings[f"broken_step, bit {bit}"]]
        readings |= {"noticed_bits": len(noticed), "broken_bits": len(broken)}
        if noticed:
            readings["lowest_noticed_bit"] = min(noticed)
        turn.record("training", readings)


class Loaded(MechanismCase):
    """A loader that meets a flipped bit in a file."""

    def __init__(self, process: FrameworkProcess, mechanism: dict[str, Any], seed: int) -> None:
        super().__init__(process, mechanism, ("loader",))
        self._seed = seed

    def measure(self, turn: Turn) -> None:
        directory = str(turn.directory)
        self.process.ask("save", mechanism=self.key, directory=directory)
        readings: dict[str, float] = {}
        for bit in range(BITS):
            found = self.process.ask(
                "flip_in_file", mechanism=self.key, directory=directory, bit=bit, seed=self._seed
            )
            readings |= {f"{name}, bit {bit}": value for name, value in found.items()}
        for name in ("found", "refused", "silent"):
            readings[name] = sum(readings.get(f"{name}, bit {bit}", 0.0) for bit in range(BITS))
        turn.record("loader", readings)


@dataclass
class BitflipsSuite(FrameworkSuite):
    name = "bitflips"

    def measured(self, process: FrameworkProcess, hello: dict[str, Any], folder: Path) -> Iterator[Group]:
        self.built = process.ask("build", model=_MODEL, quick=True, seed=self.seed)
        trained = [Trained(process, count, self.seed) for count in WEIGHTS]
        yield self.group("training", [*trained], share=0.5, warm_up=0)
        loaded = [Loaded(process, each, self.seed) for each in hello["mechanisms"]]
        yield Group("loader", loaded, 1, warm_up=0)
