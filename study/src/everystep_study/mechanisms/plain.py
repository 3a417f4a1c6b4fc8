"""Mechanisms that need no framework: of a `State`, whose arrays never change, on one rank or several."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from everystep_study.harness.files import missing_everystep
from everystep_study.mechanisms.mechanism import EverystepMechanism, Mechanism, Mode
from everystep_study.mechanisms.raw_device import raw_read, raw_write
from everystep_study.mechanisms.states import State


class RawDevice(Mechanism):
    """The bare loop of `raw_device`, which takes its own time, from open to synced."""

    key, title = "raw", "raw device"
    always_durable = only_first_rank = True
    cost_is_ours = False  # most of it goes into making and filling the buffer
    huge_pages = False

    def write(self, target: Path) -> None:
        self.own_seconds = raw_write(target, self.subject.nbytes, huge_pages=self.huge_pages)

    def load(self) -> None:
        if not self.subject.rank:
            nbytes = self.path.stat().st_size
            self.own_seconds = raw_read(self.path, nbytes, huge_pages=self.huge_pages)


class RawHugePages(RawDevice):
    """The same from huge pages: a device that gathers 4 KiB pieces one by one is faster with 2 MiB ones.

    No memory layout can beat this; the limit above is what memory as programs have it can reach.
    """

    key, title = "raw-huge", "raw, huge pages"
    huge_pages = True


class EverystepSave(Mechanism):
    """`everystep.save` into a new directory; checksums on, as by default."""

    key, title = "everystep", "Everystep"
    ours = always_durable = True
    subject: State

    @classmethod
    def missing(cls) -> str | None:
        return missing_everystep()

    def write(self, target: Path) -> None:
        import everystep

        everystep.save(target, self.subject.tree(), timeout=self.subject.timeout)

    def load(self) -> None:
        import everystep

        into = self.subject.tree() if self.subject.in_place else None
        self.subject.put(everystep.load(self.path, into, timeout=self.subject.timeout))


class Recycling(EverystepMechanism):
    """The steady state of a training: a `Checkpointer` that overwrites the files of retired checkpoints."""

    key, title = "everystep-recycled", "Everystep, recycling"
    mode: ClassVar[Mode] = "sync"
    writers: int | Literal["all"] = "all"

    def options(self) -> dict[str, Any]:
        import everystep

        return {"keep": everystep.Keep(last=1), "options": everystep.Options(writers=self.writers)}

    def open(self) -> None:
        super().open()
        # The first save has nothing to recycle; the second retires the first; from the third on it is steady.
        for _ in range(2):
            self.save()

    def load(self) -> None:
        """Into new memory, as the other mechanisms load a `State`."""
        import everystep

        self.subject.put(everystep.load(self.path, timeout=self.subject.timeout))


class Pickle(Mechanism):
    """`pickle` protocol 5 of numpy arrays, which it writes without a copy."""

    key, title = "pickle", "pickle 5"
    subject: State

    def write(self, target: Path) -> None:
        with target.open("wb") as file:
            pickle.dump(self.subject.arrays, file, protocol=5)

    def load(self) -> None:
        # Only ever a file that this very process has just written.
        with self.path.open("rb") as file:
            self.subject.put(pickle.load(file))


class Savez(Mechanism):
    """`np.savez`, uncompressed."""

    key, title = "savez", "np.savez"
    subject: State

    def write(self, target: Path) -> None:
        with target.open("wb") as file:
            self.save_arrays(file, **self.subject.arrays)

    def save_arrays(self, file: Any, **arrays: Any) -> None:
        np.savez(file, allow_pickle=False, **arrays)

    def load(self) -> None:
        with np.load(self.path, allow_pickle=False) as archive:
            self.subject.put({name: archive[name] for name in archive.files})


class SavezCompressed(Savez):
    key, title = "compressed", "np.savez_compressed"

    def save_arrays(self, file: Any, **arrays: Any) -> None:
        np.savez_compressed(file, allow_pickle=False, **arrays)


class Joblib(Mechanism):
    """`joblib.dump` of numpy arrays, as scikit-learn's guide has it."""

    key, title = "joblib", "joblib"
    needs = ("joblib",)
    subject: State

    def write(self, target: Path) -> None:
        import joblib

        with target.open("wb") as file:
            joblib.dump(self.subject.arrays, file)

    def load(self) -> None:
        import joblib

        self.subject.put(joblib.load(self.path))
