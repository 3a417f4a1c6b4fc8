"""The three calls: `save`, `load`, `open`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, get_args

from holdfast.engine import Backend, Tuning, fs
from holdfast.errors import CheckpointExists
from holdfast.plan.topology import Writers, check_writers
from holdfast.state import Framework, flatten
from holdfast.store.beside import found_at
from holdfast.store.checkpoint import Checkpoint
from holdfast.store.commit import CheckpointInfo, Commit, check_step
from holdfast.store.crew import Crew, Way, dismissing, muster
from holdfast.store.failures import saving
from holdfast.store.link import Link
from holdfast.store.loading import load_together
from holdfast.store.metrics import plain_metrics
from holdfast.store.opening import newest
from holdfast.store.partial import PARTIAL, Target
from holdfast.store.run import RETIRED
from holdfast.store.shares import Replicas
from holdfast.store.unison import open_newest_together

_STAGING_NBYTES = 32 << 20
"""More did not keep the device busier, and the first save of a process pays for every page."""
_WINDOW_NBYTES = 4 << 20
"""Eight of them kept the device busier than four of twice the size, in as much memory."""
_MAX_NBYTES = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Options:
    """How to write. The defaults are right unless `holdfast doctor` says otherwise.

    `backend` forces one of ``uring``, ``threads``, ``buffered``; `memory_nbytes` bounds the memory of a save:
    what the engine stages through, and beyond that the copies a `Checkpointer` makes of what training may
    change meanwhile. Files up to `small_nbytes` go through the page cache, where latency counts more than
    throughput.

    `writers`: which ranks write what several hold: ``"all"``, one per ``"node"`` or ``"socket"``, or so many.
    `volumes`: directories that shards go to instead of the checkpoint's own, shared out by how fast each is;
    they may be each node's own. `replicas`: ``"check"`` compares what several ranks hold the same of when it
    is first planned who writes what, and a sample of it in every save; ``"trust"`` does not.
    """

    backend: Backend | None = None
    memory_nbytes: int = 256 << 20
    small_nbytes: int = 1 << 20
    writers: Writers = "all"
    volumes: Sequence[str | os.PathLike[str]] = ()
    replicas: Replicas = "check"

    def __post_init__(self) -> None:
        check_writers(self.writers)
        if isinstance(self.volumes, (str, os.PathLike)) or not isinstance(self.volumes, Sequence):
            raise ValueError(f"volumes must be a list of directories, not {self.volumes!r}")
        if self.replicas not in get_args(Replicas):
            raise ValueError(f'replicas must be "check" or "trust", not {self.replicas!r}')
        for name, nbytes in (("memory_nbytes", self.memory_nbytes), ("small_nbytes", self.small_nbytes)):
            if type(nbytes) is not int or not 0 <= nbytes <= _MAX_NBYTES:
                raise ValueError(f"{name} must be a number of bytes, an int from 0 on, not {nbytes!r}")

    @property
    def snapshot_nbytes(self) -> int:
        """What is left for copies."""
        return max(0, self.memory_nbytes - _STAGING_NBYTES)

    def tuning(self) -> Tuning:
        window = _WINDOW_NBYTES
        depth = max(2, min(_STAGING_NBYTES, self.memory_nbytes) // window)
        if self.memory_nbytes < 2 * window:
            window = max(64 << 10, self.memory_nbytes // 2 // 4096 * 4096)
        return Tuning(self.backend, window, depth, self.small_nbytes)

    def way(self) -> Way:
        """How several ranks, or one to several volumes, write."""
        volumes = tuple(os.path.abspath(os.fsdecode(volume)) for volume in self.volumes)
        for volume in volumes:
            try:
                volume.encode()
            except UnicodeEncodeError:
                raise ValueError(f"a volume's path must be UTF-8, as manifests are: {volume!r}") from None
        if len(set(map(os.path.realpath, volumes))) < len(volumes):
            raise ValueError(f"volumes must be different directories, not {list(volumes)}")
        return Way(self.tuning(), self.writers, volumes, self.replicas)


def checked_options(options: Options | None) -> Options | None:
    """What was given for options, if that is what it is."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options must be a holdfast.Options(...), not {options!r}")
    return options


_DEFAULT = Options().tuning()


def save(
    path: str | os.PathLike[str],
    state: object,
    *,
    step: int = 0,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
    options: Options | None = None,
    together: bool | None = None,
    timeout: float = 600.0,
) -> CheckpointInfo:
    """Write one checkpoint directory at `path`; when this returns it survives a power cut.

    `state` is any nesting of dicts, lists and tuples with torch tensors, numpy arrays, plain values, and
    objects that have ``state_dict``/``load_state_dict`` (modules, optimizers, schedulers). ``overwrite=True``
    replaces the checkpoint that is there, at once and whole, but never anything else: files of others beside
    it stay. An empty directory may be there; directories above `path` are made.

    Under ``torch.distributed`` all ranks call this, each with its own state, and each writes a share of one
    checkpoint; ``together=False`` saves this rank's state by itself. `timeout`: seconds after which a rank
    waits no longer for the others.

    >>> import holdfast, numpy, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> info = holdfast.save(f"{folder}/first", {"w": numpy.arange(3), "epoch": 7})
    >>> holdfast.load(f"{folder}/first")
    {'w': array([0, 1, 2]), 'epoch': 7}
    """
    target = os.path.abspath(os.fspath(path))
    what = f"save to {target}"
    step = check_step(step)
    options = checked_options(options)
    way = None if options is None else options.way()
    team = muster(what, together, timeout)
    if team is None and (way is None or not way.volumes):
        check_target(target)
        tuning = _DEFAULT if way is None else way.tuning
        commit = Commit(Target(target), step, plain_metrics(metrics), tuning, overwrite=overwrite)
        flat = flatten(state)
        make_parent(target)
        return commit.run(flat)
    with dismissing(team):
        crew = Crew(team, way or Options().way(), timeout)
        talk = crew.begin(what, step)
        try:
            check_target(target)
            numbers = plain_metrics(metrics) if crew.leads else {}  # those of rank 0 are stored
        except BaseException as error:
            crew.failed(talk, error)
            raise
        ready = crew.prepare(state, talk)
        try:
            if crew.leads:
                make_parent(target)
        except BaseException as error:
            crew.failed(talk, error)
            raise
        info = crew.commit(ready, Target(target), step, numbers, overwrite=overwrite)
        crew.close(wait=True)
        return info


def load(
    path: str | os.PathLike[str],
    into: object = None,
    *,
    select: str | Iterable[str] | None = None,
    framework: Framework | None = None,
    verify: bool = True,
    strict: bool = True,
    together: bool | None = None,
    timeout: float = 600.0,
) -> Any:
    """Read a checkpoint (of a run: the newest) back, bit for bit.

    Without `into` the tree comes back in fresh memory: torch tensors for what was saved from torch, numpy
    arrays otherwise, or all of one kind with ``framework="torch" | "numpy"``. `select`, a glob or several,
    takes only the leaves that match; with `into`, all else in the target stays as it is.

    With `into` the state is restored in place, straight from the device into the memory of its tensors;
    modules, optimizers and other objects get their ``load_state_dict``. Leaves that are missing, extra or of
    another shape are a `StateMismatch` before anything is touched; ``strict=False`` restores what fits and
    warns about the rest, and is a `StateMismatch` if no array fits. Should the checkpoint turn out damaged
    while it is read, `CorruptCheckpoint` is raised and part of `into` is overwritten.

    Under ``torch.distributed`` all ranks call this with `into`, each with its own target, whatever layout the
    checkpoint was saved in: each gets the parts it holds, and ranks of a node that hold the same share the
    reading. ``together=False``, and loading without `into`, read by themselves: of what is `per_rank` that is
    what rank 0 saved.
    """
    team = muster(f"load of {os.fspath(path)}", together if into is not None else False, timeout)
    if team is None:
        with newest(path, Checkpoint) as checkpoint:
            return checkpoint.load(into, select=select, framework=framework, verify=verify, strict=strict)
    with dismissing(team):
        if framework is not None:
            raise TypeError("framework= goes with fresh arrays; with into= the target decides")
        with (
            open_newest_together(team, path, timeout) as checkpoint,
            closing(Link.open(timeout)) as link,
        ):
            return load_together(
                team,
                checkpoint,
                into,
                select=select,
                verify=verify,
                strict=strict,
                timeout=timeout,
                link=link,
            )


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint (of a run: the newest) without reading its arrays."""
    return newest(path, Checkpoint)


def make_parent(target: str) -> None:
    """Makes the directories above a checkpoint, and their names durable."""
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        with saving(target):
            fs.make_directories(parent)


def check_target(target: str, *, beside: bool = False) -> None:
    """Raises when no checkpoint may ever be saved there: for its name, or what is there.

    One that is there already is left to the commit, which knows whether it is to be replaced. An empty
    directory will do, and with `beside` also one with files of others.
    """
    if target.endswith((PARTIAL, RETIRED)):
        raise ValueError(f"{target}: names that end so mark what is no checkpoint; choose another")
    if fs.exists(target):
        _refuse_stranger(target, beside=beside)


def _refuse_stranger(target: str, *, beside: bool) -> None:
    """A run, somebody's home, a file: what is not a checkpoint is not ours to replace."""
    with saving(target):
        found = found_at(target, target + PARTIAL)
    if found == "something else" or (found == "others" and not beside):
        raise CheckpointExists(
            f"{target} exists and is not a checkpoint, so not even overwrite=True replaces it: "
            "choose another path"
        )
