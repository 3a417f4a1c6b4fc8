"""``everystep bench --clusters``: a checkpoint per iteration of KMeans and mixtures, on a shelf and in files.

Three questions: what one checkpoint costs (against the usual ways to write one, as people use them and made
durable), what a checkpoint per iteration costs a fit, and whether a commit grows with the size of its shelf.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from everystep_study.harness import results
from everystep_study.harness.files import missing_modules, sync
from everystep_study.harness.results import SECONDS, Bar, Interval, Result, Row
from everystep_study.harness.suite import Case, Group, Needs, Suite, Turn
from everystep_study.mechanisms.mechanism import Mechanism
from everystep_study.mechanisms.plain import Joblib, Pickle, Savez, SavezCompressed
from everystep_study.mechanisms.states import State
from everystep_study.mechanisms.torch_mechanisms import TorchSave
from everystep_study.report.elements import Columns, View, milliseconds

Array = np.ndarray[Any, Any]
MEMORY = Path("/dev/shm")
MNIST_LIKE, MUSICNET_LIKE = (70_000, 784), (70_000, 128)
IN_MEMORY_REPEATS = 20
"""In memory a commit takes microseconds: one call after others would measure what they left in the caches."""
_CONSTANT_COLUMNS = 67
"""MNIST has so many pixels that are black in every image; the rest are linearly independent."""


def synthetic(rows: int, columns: int, constant: int = 0) -> Array:
    """Non-negative data around ten centers, of full rank but for `constant` columns of zeros."""
    generator = np.random.default_rng(0)
    centers = generator.normal(0, 1, (10, columns - constant))
    data = np.zeros((rows, columns))
    for start in range(0, rows, 4096):
        part = data[start : start + 4096]
        noise = generator.normal(0, 1, (len(part), columns - constant))
        part[:, constant:] = np.maximum(centers[generator.integers(0, 10, len(part))] + noise, 0)
    return data


def load(path: Path) -> Array:
    """The data of ``--data``: a ``.npy``, or the first array of an ``.npz``, as rows of numbers."""
    found = np.load(path, allow_pickle=False)
    array = found if isinstance(found, np.ndarray) else found[found.files[0]]
    return array.reshape(len(array), -1).astype(np.float64)


def kmeans_state(data: Array, k: int) -> dict[str, Array]:
    """What KMeans stores in an iteration: means of parts of the data, as its centers are."""
    return {"centers": np.stack([data[i::k].mean(axis=0) for i in range(k)])}


def mixture_state(data: Array, k: int) -> dict[str, Array]:
    """What a mixture with full covariances stores, in single precision."""
    parts = [data[i::k][:2000].astype(np.float32) for i in range(k)]
    return {
        "weights": np.full(k, 1 / k, np.float32),
        "means": np.stack([part.mean(axis=0) for part in parts]),
        "covariances": np.stack([np.cov(part.T, dtype=np.float32) for part in parts]),
    }


WRITERS: dict[str, type[Mechanism]] = {
    "savez": Savez,
    "compressed": SavezCompressed,
    "pickle": Pickle,
    "joblib": Joblib,
    "torch": TorchSave,
}


class Checkpoint(Case):
    """One checkpoint. `medium` is where: in the turn's directory, or in memory (tmpfs)."""

    def __init__(self, section: str, key: str, state: State, in_memory: bool) -> None:
        self.key, self.sections = key, (section,)
        self.title = self._title(key)
        self._state, self._in_memory = state, in_memory
        self._folder: Path | None = None
        self._shelf: Any = None
        self._floor = -1

    @staticmethod
    def _title(key: str) -> str:
        name, _, durable = key.partition("-")
        if name in WRITERS:
            return WRITERS[name].title + (", durable" if durable else "")
        return {"shelf": "everystep.Shelf", "floor": "one sync of 4 KiB"}[name]

    def missing(self) -> str | None:
        name = self.key.partition("-")[0]
        return WRITERS[name].missing() if name in WRITERS else None

    def setup(self, directory: Path) -> None:
        if self._in_memory:
            self._folder = Path(tempfile.mkdtemp(prefix="everystep-bench-", dir=MEMORY))
        folder = self._folder or directory
        if self.key == "shelf":
            import everystep

            size = 8 * self._state.nbytes + (16 << 20)
            self._shelf = everystep.Shelf(folder / "fit.shelf", size=size)
        elif self.key == "floor":
            self._floor = os.open(folder / "floor", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(self._floor, 0, 1 << 20)
            os.pwrite(self._floor, bytes(1 << 20), 0)
            os.fsync(self._floor)

    def measure(self, turn: Turn) -> None:
        # An iteration has changed the state: nothing may be left out because it is equal.
        for array in self._state.arrays.values():
            array.reshape(-1)[:1] = turn.round
        folder = self._folder or turn.directory
        call = {"shelf": self._commit, "floor": self._sync}.get(self.key) or (lambda: self._write(folder))
        repeats = IN_MEMORY_REPEATS if self._in_memory else 1

        def calls() -> None:
            for _ in range(repeats):
                call()

        call()
        _, readings = turn.time(calls)
        turn.record(self.sections[0], {name: value / repeats for name, value in readings.items()})

    def _commit(self) -> None:
        with self._shelf.transaction():
            for name, array in self._state.arrays.items():
                self._shelf[name] = array

    def _sync(self) -> None:
        os.pwrite(self._floor, os.urandom(4096), 0)
        os.fdatasync(self._floor)

    def _write(self, folder: Path) -> None:
        name, _, durable = self.key.partition("-")
        path = folder / "checkpoint"
        target = folder / "checkpoint.tmp" if durable else path
        WRITERS[name](self._state, folder, durable=False).write(target)
        if durable:
            sync(target)
            os.rename(target, path)
            sync(folder)

    def check(self) -> None:
        if self._shelf is not None:
            for name, array in self._state.arrays.items():
                if not np.array_equal(self._shelf[name], array):
                    raise RuntimeError(f"the shelf holds something else as {name}")

    def close(self) -> None:
        if self._shelf is not None:
            self._shelf.close()
        if self._floor >= 0:
            os.close(self._floor)
        if self._folder is not None:
            shutil.rmtree(self._folder)


class Fit(Case):
    """A whole fit, with a checkpoint per iteration (``shelf``) or without (``plain``)."""

    sections = ("fit",)

    def __init__(self, key: str, make: Callable[..., Any], data: Array) -> None:
        self.key = key
        self.title = {"shelf": "on a shelf", "plain": "scikit-learn"}[key]
        self._make, self._data = make, data

    def missing(self) -> str | None:
        return missing_modules("sklearn")

    def measure(self, turn: Turn) -> None:
        spent = [0.0]
        with _counted(spent), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the number of iterations is limited on purpose
            shelf = {"shelf": turn.directory / "fit.shelf"} if self.key == "shelf" else {}
            model, readings = turn.time(lambda: self._make(**shelf).fit(self._data))
        share = spent[0] / readings[SECONDS]
        turn.record("fit", {**readings, "share": share, "iterations": float(model.n_iter_)})


@contextmanager
def _counted(spent: list[float]) -> Iterator[None]:
    """Adds the time that fits spend on fingerprints and on the shelf."""
    from everystep.integrations.sklearn.base import FitProgress
    from everystep.integrations.sklearn.record import FitRecord

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    places = [(FitProgress, "begin"), (FitRecord, "commit"), (FitRecord, "commit_soon"), (FitRecord, "close")]
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    try:
        for owner, name, function in kept:
            setattr(owner, name, timed(function))
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


class GrownCommit(Case):
    """A commit of ten centers of 784 numbers to a shelf that holds so many bytes beside them."""

    sections = ("size",)

    def __init__(self, megabytes: int) -> None:
        self.key, self.title = f"{megabytes}MB", f"beside {megabytes:,} MB"
        self._nbytes = megabytes * 1_000_000
        self._centers = np.random.default_rng(0).normal(size=(10, 784))
        self._shelf: Any = None

    def setup(self, directory: Path) -> None:
        import everystep

        self._shelf = everystep.Shelf(directory / "large.shelf", size=self._nbytes + (64 << 20))
        piece = np.random.default_rng(1).integers(0, 256, min(self._nbytes, 10_000_000), dtype=np.uint8)
        for number in range(max(1, self._nbytes // len(piece))):
            self._shelf[f"piece{number}"] = piece

    def measure(self, turn: Turn) -> None:
        self._centers[0, 0] = turn.round

        def commit() -> None:
            self._shelf["centers"] = self._centers

        turn.record("size", turn.time(commit)[1])

    def close(self) -> None:
        if self._shelf is not None:
            self._shelf.close()


@dataclass
class ClustersSuite(Suite):
    """`data` None is synthetic data of MNIST's shape and rank."""

    name = "clusters"
    ours: ClassVar[tuple[str, ...]] = ("shelf",)
    data: Path | None = None
    rows: int = 70_000
    rounds: int = 30
    fit_rounds: int = 3
    mixture_rounds: int = 5
    ks: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 9, 10)
    mixture_ks: tuple[int, ...] = (2, 4, 6, 8, 10)
    megabytes: tuple[int, ...] = (1, 10, 100, 1000)

    @classmethod
    def quick(cls) -> ClustersSuite:
        return cls(
            rows=7_000, rounds=10, mixture_rounds=3, ks=(2, 10), mixture_ks=(2, 10), megabytes=(1, 10, 100)
        )

    def needs(self) -> Needs:
        if self.data is not None and not self.data.is_file():
            raise ValueError(f"there is no file {self.data}")
        pixels = 8 * self.rows * MNIST_LIKE[1]
        return Needs(2_000_000 * max(self.megabytes), 6 * pixels)

    def groups(self, folder: Path) -> Iterator[Group]:
        if self.data is None:
            pixels = synthetic(self.rows, MNIST_LIKE[1], _CONSTANT_COLUMNS)
        else:
            pixels = load(self.data)
        notes = synthetic(self.rows, MUSICNET_LIKE[1])
        self._shapes = f"{_shape(pixels)} and {_shape(notes)}"
        for media, in_memory in (("memory", True), ("disk", False)):
            for k in self.ks:
                state = kmeans_state(pixels, k)
                yield self._checkpoints(f"KMeans, {media}", k, state, in_memory, self.rounds)
        for k in (min(self.ks), max(self.ks)):
            yield self._checkpoints("KMeans, 128 features", k, kmeans_state(notes, k), False, self.rounds)
        for k in self.mixture_ks:
            state = mixture_state(pixels, k)
            yield self._checkpoints("mixture, disk", k, state, False, self.mixture_rounds)
        for k in (min(self.ks), max(self.ks)):
            state = mixture_state(notes, k)
            yield self._checkpoints("mixture, 128 features", k, state, False, self.mixture_rounds)
        sizes = [GrownCommit(megabytes) for megabytes in self.megabytes]
        yield Group("size", sizes, self.rounds, settle=False)
        for name, make, data in self._fits(pixels, notes):
            yield Group(name, [Fit("plain", make, data), Fit("shelf", make, data)], self.fit_rounds)

    def _fits(self, pixels: Array, notes: Array) -> Iterator[tuple[str, Callable[..., Any], Array]]:
        from everystep.integrations.sklearn import GaussianMixture, KMeans

        for k in (min(self.ks), max(self.ks)):
            yield f"KMeans, {pixels.shape[1]} features, k={k}", partial(KMeans, k, **_SEEDED), pixels
        yield f"KMeans, {notes.shape[1]} features, k=10", partial(KMeans, 10, **_SEEDED), notes
        few: dict[str, Any] = {"init_params": "random_from_data", "max_iter": 8, "tol": 0}
        mixture = partial(GaussianMixture, 4, random_state=0, **few)
        yield f"mixture, {notes.shape[1]} features, k=4", mixture, notes

    @staticmethod
    def _checkpoints(section: str, k: int, arrays: dict[str, Array], in_memory: bool, rounds: int) -> Group:
        state = State.of(arrays)
        keys = ["shelf", "floor", *WRITERS, *(f"{name}-durable" for name in WRITERS)]
        cases = [Checkpoint(section, key, state, in_memory) for key in keys]
        return Group(f"{section}, k={k}", cases, rounds, warm_up=2, settle=False)

    def subject(self) -> str:
        return f"{self._shapes}, {'synthetic' if self.data is None else self.data.name}"

    def views(self, result: Result) -> list[View]:
        found = []
        checkpoints = [row.section for row in result.rows if row.section not in ("fit", "size")]
        for section in dict.fromkeys(checkpoints):
            for kind, ending in (("durable", "-durable"), ("without fsync", "")):
                columns: Columns = {
                    kind.title: (lambda row, key=name + ending: _times(result, row, key))  # type: ignore[misc]
                    for name, kind in WRITERS.items()
                }
                if ending:
                    columns["one sync, ms"] = lambda row: milliseconds(_median(result.beside(row, "floor")))
                title = f"{section}: a shelf's durable commit, and how many times as long others take, {kind}"
                found.append(
                    View(section, title, "ms", show=_fine, columns=columns, ours=("shelf",), cases=("shelf",))
                )
        fits: Columns = {
            "iterations": lambda row: f"{row.median('iterations'):.0f}",
            "on the shelf, %": lambda row: row.median("share", 100) if row.case == "shelf" else None,
            "times scikit-learn": lambda row: results.ratio(row, result.beside(row, "plain")),
        }
        named: Any = lambda row: f"{row.group}: {row.title}"  # noqa: E731
        return [
            *(_named_by_group(view) for view in found),
            View("size", "commit of 63 kB, by the size of the shelf", "ms", show=_fine, ours=self.ours),
            View("fit", "a fit, a checkpoint per iteration", columns=fits, ours=self.ours, named_by=named),
        ]

    def notes(self, result: Result) -> list[str]:
        return [
            "Durable: temporary file, fsync, rename, fsync of the directory. Ratios have the 95 % interval "
            "of a bootstrap over the rounds. 'memory' is tmpfs: what is written there does not outlive a "
            "power cut, so only the work beside the device is compared. 'on the shelf' is the share of a "
            "fit that fingerprints and commits take."
        ]

    def bars(self, result: Result) -> list[Bar]:
        promises = [
            ("KMeans, memory", "savez", 10.0),
            ("KMeans, memory", "compressed", 10.0),
            ("KMeans, disk", "savez", 2.0),
            ("KMeans, disk", "compressed", 2.0),
            ("mixture, disk", "compressed", 3.0),
            ("mixture, disk", "savez", 1.0),
        ]
        found = [_least(result, *promise) for promise in promises]
        for row in result.section("fit"):
            if row.case == "shelf" and row.group.startswith("KMeans"):
                share = results.scaled(results.interval(row, "share"), 100)
                promise, key = f"checkpoints, of a fit: {row.group}", f"fit-{row.group}"
                found.append(results.judge(key, promise, "<=", 3.0, "%", share, results.why_not(row)))
        small, large = (result.row("size", f"{m}MB") for m in (self.megabytes[0], self.megabytes[-1]))
        promise = f"commit to {self.megabytes[-1]:,} MB, against {self.megabytes[0]} MB"
        return [*found, results.promised("size", promise, "<=", 1.5, large, small)]


_SEEDED: dict[str, Any] = {"n_init": 1, "random_state": 0, "max_iter": 30}


def _shape(array: Array) -> str:
    return " x ".join(f"{length:,}" for length in array.shape)


def _fine(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def _median(row: Row | None) -> float | None:
    return None if row is None else row.median()


def _named_by_group(view: View) -> View:
    return replace(view, named_by=lambda row: row.group.rpartition(", ")[2])


def _interval(result: Result, shelf: Row, key: str) -> Interval | None:
    """How many times as long as the shelf another way takes."""
    other = result.beside(shelf, key)
    if other is None or not other.samples or not shelf.samples:
        return None
    return results.ratio_interval(other, shelf)


def _times(result: Result, shelf: Row, key: str) -> str | None:
    found = _interval(result, shelf, key)
    return None if found is None else f"{found.value:.1f} ({found.low:.1f}-{found.high:.1f})"


def _least(result: Result, section: str, name: str, limit: float) -> Bar:
    """The promise, judged by the number of clusters for which it is kept least."""
    rows = [row for row in result.section(section) if row.case == "shelf"]
    key = f"{name}-durable"
    found = [interval for row in rows if (interval := _interval(result, row, key)) is not None]
    least = min(found, key=lambda interval: interval.value, default=None)
    others = [result.beside(row, key) for row in rows]
    promise = f"{section}: commit, against {WRITERS[name].title}, durable"
    return results.judge(
        f"{section}-{name}", promise, ">=", limit, "x", least, results.why_not(*rows, *others)
    )
