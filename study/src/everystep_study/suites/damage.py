"""What happens to a checkpoint that is damaged, planted or overwritten: found out by doing it.

Three kinds of trouble, for any format: single flipped bits anywhere in its files; pickles that run code, in
place of each file and of each member of a zip archive; a process that is killed while it overwrites a
checkpoint.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from everystep_study.frameworks import FrameworkEntry
from everystep_study.harness.costs import wall_seconds
from everystep_study.harness.files import files_below, remove, sync_tree
from everystep_study.harness.results import SECONDS
from everystep_study.harness.suite import Turn
from everystep_study.suites.by_framework import MechanismCase
from everystep_study.workers.orders import Context, build, digest, load, save
from everystep_study.workers.processes import FrameworkProcess, WorkerFailed

_BEGIN_SECONDS = 60.0
_POLL_SECONDS = 0.0005


@contextmanager
def file_bit_flipped(file: Path, offset: int, bit: int) -> Iterator[None]:
    """A context in which one bit of a file is the other way round."""

    def flip() -> None:
        with file.open("r+b") as stream:
            stream.seek(offset)
            old = stream.read(1)[0]
            stream.seek(offset)
            stream.write(bytes([old ^ (1 << bit)]))

    flip()
    try:
        yield
    finally:
        flip()


class Flips(MechanismCase):
    """Flips one bit after the other, each at a random place of all files, loads, and flips it back."""

    def __init__(self, process: FrameworkProcess, mechanism: dict[str, Any], flips: int, seed: int) -> None:
        super().__init__(process, mechanism, ("flipped bits",))
        self._flips, self._seed = flips, seed

    def measure(self, turn: Turn) -> None:
        directory = str(turn.directory)
        saved = self.process.ask(save, mechanism=self.key, directory=directory)
        files = files_below(Path(saved["path"]))
        sizes = [file.stat().st_size for file in files]
        draw = random.Random(self._seed)
        refused = silent = 0
        for _ in range(self._flips):
            file = draw.choices(files, sizes)[0]
            with file_bit_flipped(file, draw.randrange(file.stat().st_size), draw.randrange(8)):
                try:
                    found = self.process.ask(load, mechanism=self.key, directory=directory, again=True)
                except WorkerFailed:  # an error, or the end of the process: the user will look
                    refused += 1
                else:
                    silent += not found["readings"]["equal"]
        turn.record(
            "flipped bits",
            {
                "flips": self._flips,
                "refused": refused,
                "silent": silent,
                "harmless": self._flips - refused - silent,
            },
        )


class Planted(MechanismCase):
    """Loads checkpoints in which code was planted, and looks whether it ran."""

    def __init__(self, process: FrameworkProcess, mechanism: dict[str, Any]) -> None:
        super().__init__(process, mechanism, ("planted code",))

    def measure(self, turn: Turn) -> None:
        saved = turn.directory / "saved"
        path = Path(self.process.ask(save, mechanism=self.key, directory=str(saved))["path"])
        kept = turn.directory / "kept"
        shutil.copytree(saved, kept)
        marker = turn.directory / "ran"
        readings = {"attacks": 0.0, "ran": 0.0}

        def attempt(name: str) -> None:
            readings["attacks"] += 1
            with suppress(WorkerFailed):  # refused, perhaps after the code has run: the marker tells
                self.process.ask(load, mechanism=self.key, directory=str(saved), again=True)
            if marker.exists():
                marker.rmdir()
                readings["ran"] += 1
                readings[f"ran from {name}"] = 1.0

        for file, name, content in evil_files(path, marker):
            file.write_bytes(content)
            attempt(name)
            remove(saved)
            shutil.copytree(kept, saved)
        if self.process.ask(plant, mechanism=self.key, directory=str(saved), marker=str(marker))["planted"]:
            attempt("the format's own means")
        turn.record("planted code", readings)


class Evil:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._marker,)


def evil_files(path: Path, marker: Path) -> Iterator[tuple[Path, str, bytes]]:
    """Files to overwrite one at a time, what to call each, and the content that would run code."""
    code = pickle.dumps(Evil(marker), protocol=2)
    array = io.BytesIO()
    np.save(array, np.array([Evil(marker)], dtype=object), allow_pickle=True)
    for file in files_below(path):
        yield file, f"{file.name}", code
        if not zipfile.is_zipfile(file):
            continue
        with zipfile.ZipFile(file) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
        for member in members:
            if member.endswith((".pkl", ".npy")):
                yield (
                    file,
                    f"{Path(member).name} in {file.name}",
                    _zipped({**members, member: code if member.endswith(".pkl") else array.getvalue()}),
                )


def _zipped(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def overwrite(context: Context, mechanism: str, directory: str) -> dict[str, float]:
    """Two saves to one name with a step between them. The process is to be killed during the second.

    The file ``DIRECTORY.begun`` appears when the second begins, with the digests of both states.
    """
    training = context.training
    with context.opened(mechanism, directory, durable=True) as opened:
        opened.save_and_sync()
        opened.wait()
        sync_tree(opened.directory)
        old = digest(training.arrays(opened.weights_only))
        training.step()
        begun = Path(f"{directory}.new")
        begun.write_text(f"{old} {digest(training.arrays(opened.weights_only))}")
        begun.rename(f"{directory}.begun")
        return {SECONDS: wall_seconds(opened.save_and_sync) + wall_seconds(opened.wait)}


def plant(context: Context, mechanism: str, directory: str, marker: str) -> dict[str, Any]:
    with context.opened(mechanism, directory, durable=False) as opened:
        return {"planted": opened.plant(Path(marker))}


class Kills(MechanismCase):
    """Kills a process while it overwrites a checkpoint, and looks what is left: the old one, the new one, or
    neither.

    A first process overwrites to the end, which tells how long that takes and what the new one is.
    """

    def __init__(
        self,
        entry: FrameworkEntry,
        process: FrameworkProcess,
        mechanism: dict[str, Any],
        build: dict[str, Any],
        kills: int,
    ) -> None:
        super().__init__(process, mechanism, ("killed while overwriting",))
        self._entry, self._build, self._kills = entry, build, kills

    def measure(self, turn: Turn) -> None:
        counts = {"kills": 0.0, "old kept": 0.0, "new complete": 0.0, "lost": 0.0}
        with FrameworkProcess(
            "victim", self._entry, turn.directory, _BEGIN_SECONDS, self.process.end
        ) as victim:
            victim.ask(build, **self._build)
            whole = turn.directory / "whole"
            seconds = victim.ask(overwrite, mechanism=self.key, directory=str(whole))["seconds"]
            for number in range(self._kills):
                if number:
                    victim.ask(build, **self._build)  # starts a new process: the last one was killed
                place = turn.directory / f"killed-{number}"
                old, new = self._kill(victim, place, seconds * (number + 1) / (self._kills + 1))
                counts["kills"] += 1
                try:
                    found = self.process.ask(load, mechanism=self.key, directory=str(place))["digest"]
                except WorkerFailed:
                    found = None
                counts["old kept" if found == old else "new complete" if found == new else "lost"] += 1
        turn.record("killed while overwriting", counts)

    def _kill(self, victim: FrameworkProcess, place: Path, seconds: float) -> list[str]:
        """Kills so many seconds after the second save began; the digests of the old and the new state."""
        victim.begin(overwrite, mechanism=self.key, directory=str(place))
        begun = Path(f"{place}.begun")
        end = time.monotonic() + _BEGIN_SECONDS
        while not begun.exists():
            victim.look_at_clock()
            if time.monotonic() > end:
                raise WorkerFailed("the save that was to be killed did not begin")
            time.sleep(_POLL_SECONDS)
        time.sleep(seconds)
        victim.kill()
        return begun.read_text().split()
