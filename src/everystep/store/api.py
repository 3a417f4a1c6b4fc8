"""The three calls: `save`, `load`, `open`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from everystep.engine import fs
from everystep.errors import CheckpointExists
from everystep.paths import local_path
from everystep.state import Framework, flatten
from everystep.state.mismatch import offering
from everystep.store.commit.existing_directory import found_at
from everystep.store.commit.info import CheckpointInfo, check_step
from everystep.store.commit.single import SingleCommit
from everystep.store.commit.transaction import Target
from everystep.store.metrics import plain_metrics
from everystep.store.names import PARTIAL, RETIRED
from everystep.store.options import Options, checked_options, reading_tuning
from everystep.store.ranks.channel import Channel
from everystep.store.ranks.errors import failing_the_save
from everystep.store.ranks.group import ProcessGroup, RankGroup, join_group, leaving
from everystep.store.ranks.open_together import open_newest_together
from everystep.store.ranks.shared_load import load_together
from everystep.store.ranks.transport import Transport
from everystep.store.read.checkpoint import Checkpoint, open_newest
from everystep.store.read.foreign import renaming
from everystep.store.read.references import is_reference
from everystep.store.read.restoring import refuse_fresh
from everystep.store.save_errors import saving

_DEFAULT = Options().tuning()


def save(
    path: str | os.PathLike[str],
    state: object,
    *,
    step: int = 0,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
    options: Options | None = None,
    process_group: ProcessGroup = None,
    timeout: float = 600.0,
) -> CheckpointInfo:
    """Write one checkpoint directory at `path`; when this returns it survives a power cut.

    `state` is any nesting of dicts, lists and tuples with torch tensors, numpy arrays, plain values, and
    objects that have ``state_dict``/``load_state_dict`` (modules, optimizers, schedulers). ``overwrite=True``
    replaces the checkpoint that is there, at once and whole, but never anything else: files of others beside
    it stay. An empty directory may be there; directories above `path` are made.

    Under ``torch.distributed`` all ranks call this, each with its own state, and each writes a share of one
    checkpoint. `process_group`: some ranks instead of all; ``"none"``: this rank saves its own state alone.
    `timeout`: seconds after which a rank waits no longer for the others.

    >>> import everystep, numpy, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> info = everystep.save(f"{folder}/first", {"w": numpy.arange(3), "epoch": 7})
    >>> everystep.load(f"{folder}/first")
    {'w': array([0, 1, 2]), 'epoch': 7}
    """
    target = local_path(path)
    what = f"save to {target}"
    step = check_step(step)
    options = checked_options(options)
    settings = None if options is None else options.write_settings()
    with failing_the_save():
        transport = join_group(what, process_group, timeout)
    if transport is None and (settings is None or not settings.volumes):
        check_target(target)
        tuning = _DEFAULT if settings is None else settings.tuning
        commit = SingleCommit(Target(target), step, plain_metrics(metrics), tuning, overwrite=overwrite)
        flat = flatten(state)
        make_parent(target)
        return commit.run(flat)
    with leaving(transport):
        with failing_the_save():
            group = RankGroup(transport, settings or Options().write_settings(), timeout)
        save_round = group.begin(what, step)
        try:
            check_target(target)
            numbers = plain_metrics(metrics) if group.is_coordinator else {}  # those of rank 0 are stored
        except BaseException as error:
            group.failed(save_round, error)
            raise
        ready = group.prepare(state, save_round)
        try:
            if group.is_coordinator:
                make_parent(target)
        except BaseException as error:
            group.failed(save_round, error)
            raise
        info = group.commit(ready, Target(target), step, numbers, overwrite=overwrite)
        group.close(wait=True)
        return info


def load(
    path: str | os.PathLike[str],
    into: object = None,
    *,
    select: str | Iterable[str] | None = None,
    framework: Framework | None = None,
    device: Any = None,
    verify: bool = True,
    strict: bool = True,
    rename: object = None,
    as_training: bool | None = None,
    options: Options | None = None,
    process_group: ProcessGroup = None,
    timeout: float = 600.0,
) -> Any:
    """Read a checkpoint (of a run: the newest) back, bit for bit.

    `path`: a checkpoint, a run, or a checkpoint of a run by its step: ``runs/a@30``, ``runs/a@latest``, and
    ``runs/a@-2`` for the one before the newest.

    Without `into` the tree comes back in fresh memory: torch tensors for what was saved from torch, numpy
    arrays otherwise, or all of one kind with ``framework="torch" | "numpy"``. `select` takes only
    part of it: a subtree by its name (``"model"``, values included), leaves by a glob, or several of these;
    with `into`, all else in the target stays as it is. `device`: where
    fresh tensors go, such as ``"cuda:0"``; they pass through host memory in batches.

    With `into` the state is restored in place, straight from the device into the memory of its tensors;
    modules, optimizers and other objects get their ``load_state_dict``. Leaves that are missing, extra or of
    another shape are a `StateMismatch` before anything is touched; ``strict=False`` restores what fits and
    warns about the rest, and is a `StateMismatch` if no array fits. Should the checkpoint turn out damaged
    while it is read, `CorruptCheckpoint` is raised and part of `into` is overwritten.

    `rename` gives parameters of the checkpoint the names that they have in `into`: ``{"module.": ""}`` takes
    a prefix away, and an `everystep.universal.Spec` or a list of its rules says more. It is for names in the
    state dicts of modules and optimizers, and in dicts of nothing but arrays; what nothing matches stays.

    A file of another system gives what its own library loads. ``as_training=True`` arranges it as a training
    state, with entries ``model`` and ``optimizer`` (docs/universal.md). By default that is done for what a
    training of that system wrote, and for a target whose entries the file does not have as it is.

    Under ``torch.distributed`` all ranks call this with `into`, each with its own target, whatever layout the
    checkpoint was saved in: each gets the parts it holds, and ranks of a node that hold the same share the
    reading. With ``process_group="none"``, and without `into`, a rank reads alone: of what is `per_rank`, it
    gets what rank 0 saved.
    """
    local_path(path)
    transport = join_group(
        f"load of {os.fspath(path)}", process_group if into is not None else "none", timeout
    )
    if transport is None:
        with open(path, as_training=as_training, options=options) as checkpoint:
            return checkpoint.load(
                into,
                select=select,
                framework=framework,
                device=device,
                verify=verify,
                strict=strict,
                rename=rename,
            )
    with leaving(transport):
        refuse_fresh(framework, device)
        new_names = renaming(rename)
        with (
            open_newest_together(transport, path, timeout, reading_tuning(options)) as opened,
            _channel(transport, timeout) as channel,
            offering("into", "rename", "select", "strict"),
        ):
            opened._arrange(as_training)
            return load_together(
                transport,
                opened,
                into,
                select=select,
                verify=verify,
                strict=strict,
                rename=new_names,
                timeout=timeout,
                channel=channel,
            )


@contextmanager
def _channel(transport: Transport, timeout: float) -> Iterator[Channel | None]:
    """The way from rank to rank, for one load; None where ranks cannot send arrays to each other."""
    if not transport.by_torch:
        yield None
        return
    with closing(Channel.open(timeout, transport.subgroup)) as channel:
        yield channel


def open(
    path: str | os.PathLike[str], *, as_training: bool | None = None, options: Options | None = None
) -> Checkpoint:
    """Open a checkpoint (of a run: the newest, or ``RUN@STEP``) without reading its arrays.

    `as_training`: how a file of another system is shown, see `load`. `options` say how to read: `backend` and
    `memory_nbytes`.
    """
    return open_newest(path, reading_tuning(options), as_training=as_training)


def make_parent(target: str) -> None:
    """Makes the directories above a checkpoint, and their names durable."""
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        with saving(target):
            fs.make_directories(parent)


def check_target(target: str, *, allow_other_files: bool = False) -> None:
    """Raises when no checkpoint may ever be saved there: for its name, or what is there.

    One that is there already is left to the commit, which knows whether it is to be replaced. An empty
    directory will do, and with `allow_other_files` also one with files of others.
    """
    if target.endswith((PARTIAL, RETIRED)):
        raise ValueError(f"{target}: names that end so mark what is no checkpoint; choose another")
    refuse_reference(target)
    if fs.exists(target):
        _refuse_stranger(target, allow_other_files=allow_other_files)


def refuse_reference(target: str) -> None:
    """`ValueError` for a name such as ``RUN@30``, by which checkpoints of a run are read."""
    if is_reference(target):
        run = target.rpartition("@")[0]
        raise ValueError(f"{target} means a checkpoint of the run {run}, for reading: save to another path")


def _refuse_stranger(target: str, *, allow_other_files: bool) -> None:
    """A run, somebody's home, a file: what is not a checkpoint is not ours to replace."""
    with saving(target):
        found = found_at(target, target + PARTIAL)
    if found == "something else" or (found == "others" and not allow_other_files):
        raise CheckpointExists(
            f"{target} exists and is not a checkpoint, so not even overwrite=True replaces it: "
            "choose another path"
        )
