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
from everystep.store.commit.driver import Commit
from everystep.store.commit.existing_directory import found_at
from everystep.store.commit.info import CheckpointInfo, check_step
from everystep.store.commit.share import whole
from everystep.store.commit.transaction import Transaction
from everystep.store.metrics import plain_metrics
from everystep.store.names import PARTIAL, RETIRED
from everystep.store.options import Options, checked_options, reading_tuning
from everystep.store.ranks.channel import Channel
from everystep.store.ranks.errors import failing_the_save
from everystep.store.ranks.group import ProcessGroup, RankGroup, join_group
from everystep.store.ranks.meeting import Meeting, meeting_for
from everystep.store.ranks.open_together import open_newest_together
from everystep.store.ranks.shared_load import load_together
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
    """Write one checkpoint directory at `path`. When this returns, the checkpoint survives a power cut.

    Under ``torch.distributed`` all ranks call this, each with its own state, and each writes a share of one
    checkpoint.

    Args:
        path: The directory to make. Directories above it are made, too. An empty directory may be there.
        state: Any nesting of dicts, lists and tuples with torch tensors, numpy arrays, plain values, and
            objects that have ``state_dict``/``load_state_dict`` (modules, optimizers, schedulers).
        step: How many steps the training has completed.
        metrics: Numbers to store beside the state. With several ranks, those of rank 0 are stored.
        overwrite: Replace the checkpoint that is there, at once and whole. Nothing else is ever replaced, and
            other files beside it stay.
        options: How to write.
        process_group: The ranks that save together, instead of all. ``"none"``: this rank saves its own state
            alone.
        timeout: Seconds after which a rank no longer waits for the others.

    >>> import everystep, numpy, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> info = everystep.save(f"{folder}/first", {"w": numpy.arange(3), "epoch": 7})
    >>> everystep.load(f"{folder}/first")
    {'w': array([0, 1, 2]), 'epoch': 7}
    """
    target = local_path(path)
    step = check_step(step)
    options = checked_options(options)
    settings = None if options is None else options.write_settings()
    transport = join_group(process_group)
    if transport is None and (settings is None or not settings.volumes):
        check_target(target)
        tuning = _DEFAULT if settings is None else settings.tuning
        numbers = plain_metrics(metrics)
        share = whole(flatten(state))
        make_parent(target)
        return Commit(Transaction(target, overwrite=overwrite), step, numbers, tuning).run(share)
    with failing_the_save():
        group, save_round = RankGroup.for_one_save(
            f"save to {target}", step, transport, settings or Options().write_settings(), timeout
        )
    succeeded = False
    try:
        try:
            check_target(target)
            numbers = plain_metrics(metrics) if group.is_coordinator else {}  # those of rank 0 are stored
            share = group.prepare(state, save_round)
            if group.is_coordinator:
                make_parent(target)
        except BaseException as error:
            group.failed(save_round, error)
            raise
        info = group.commit(share, save_round, Transaction(target, overwrite=overwrite), step, numbers)
        succeeded = True
        return info
    finally:
        group.close(succeeded=succeeded)


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
    """Read a checkpoint back, bit for bit: into new objects, or in place into those of `into`.

    Without `into`, the state comes back in fresh memory: torch tensors for what was saved from torch, numpy
    arrays otherwise. With `into`, it is restored in place, straight from the device into the memory of the
    tensors; modules, optimizers and other objects get their ``load_state_dict``. If leaves are missing, extra
    or of another shape, `StateMismatch` is raised before anything is touched. If the checkpoint turns out to
    be damaged while it is read, `CorruptCheckpoint` is raised, and part of `into` is overwritten.

    Under ``torch.distributed`` all ranks call this with `into`, each with its own target, whatever layout the
    checkpoint was saved in. Each rank gets the parts it holds, and ranks of a node that hold the same share
    the reading. Without `into`, a rank reads alone, and of `per_rank` state it gets what rank 0 saved.

    Args:
        path: A checkpoint, a run (its newest is read), or a checkpoint of a run by its step: ``runs/a@30``,
            ``runs/a@latest``, and ``runs/a@-2`` for the one before the newest. A file of another system gives
            what its own library loads.
        into: The state to restore in place.
        select: Take only part of the state: a subtree by its name (``"model"``, values included), leaves by a
            glob, or several of these. Everything else in `into` stays as it is.
        framework: Without `into`: ``"torch"`` or ``"numpy"`` for all arrays.
        device: Without `into`: where new tensors go, such as ``"cuda:0"``. They pass through host memory in
            batches.
        verify: Compare everything that is read with its checksums.
        strict: Raise `StateMismatch` unless all of `into` and of the checkpoint fit each other. ``False``
            restores what fits and warns about the rest; it still raises if no array fits.
        rename: With `into`: the names that parameters of the checkpoint have there. ``{"module.": ""}`` takes
            a prefix away; an `everystep.universal.Spec` or a list of its rules says more. It applies to state
            dicts of modules and optimizers, and to dicts of nothing but arrays. Names that nothing matches
            stay.
        as_training: How to show a file of another system: ``True`` arranges it as a training state, with
            entries ``model`` and ``optimizer`` (docs/universal.md); ``False`` shows what its own library
            loads. By default it is arranged if a training of that system wrote it, or if `into` has entries
            that the file only has when it is arranged.
        options: How to read: its `backend`, `memory_nbytes` and `max_inflation` count.
        process_group: The ranks that load together, instead of all. ``"none"``: this rank loads alone.
        timeout: Seconds after which a rank no longer waits for the others.
    """
    local_path(path)
    transport = join_group(process_group if into is not None else "none")
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
    with closing(transport), meeting_for(transport, f"load of {os.fspath(path)}", timeout) as meeting:
        refuse_fresh(framework, device)
        new_names = renaming(rename)
        with (
            open_newest_together(meeting, path, reading_tuning(options)) as opened,
            _channel(meeting) as channel,
            offering("into", "rename", "select", "strict"),
        ):
            opened._arrange(as_training)
            return load_together(
                meeting,
                opened,
                into,
                select=select,
                verify=verify,
                strict=strict,
                rename=new_names,
                channel=channel,
            )


@contextmanager
def _channel(meeting: Meeting) -> Iterator[Channel | None]:
    """The channel between ranks for one load; None if ranks cannot send arrays to each other."""
    if not meeting.transport.by_torch:
        yield None
        return
    with closing(Channel.open(meeting.timeout, meeting.subgroup)) as channel:
        yield channel


def open(
    path: str | os.PathLike[str], *, as_training: bool | None = None, options: Options | None = None
) -> Checkpoint:
    """Open a checkpoint without reading its arrays.

    Args:
        path: A checkpoint, a run (its newest is opened), or ``RUN@STEP``.
        as_training: How to show a file of another system; see `load`.
        options: How to read: its `backend`, `memory_nbytes` and `max_inflation` count.
    """
    return open_newest(path, reading_tuning(options), as_training=as_training)


def make_parent(target: str) -> None:
    """Makes the directories above a checkpoint, and their names durable."""
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        with saving(target):
            fs.make_directories(parent)


def check_target(target: str, *, allow_other_files: bool = False) -> None:
    """Raises if no checkpoint may ever be saved there, because of the name or of what is there.

    A checkpoint there is left to the commit, which knows whether to replace it. An empty directory is
    allowed, and with `allow_other_files` also one with other files.
    """
    if target.endswith((PARTIAL, RETIRED)):
        raise ValueError(f"{target}: '.partial' and '.retired' are reserved suffixes; choose another name")
    refuse_reference(target)
    if fs.exists(target):
        _refuse_stranger(target, allow_other_files=allow_other_files)


def refuse_reference(target: str) -> None:
    """`ValueError` for a name such as ``RUN@30``, by which checkpoints of a run are read."""
    if "@" in target and is_reference(target):
        run = target.rpartition("@")[0]
        raise ValueError(f"{target} means a checkpoint of the run {run}, for reading: save to another path")


def _refuse_stranger(target: str, *, allow_other_files: bool) -> None:
    """Refuses to replace anything but a checkpoint: a run, a home directory, a file."""
    with saving(target):
        found = found_at(target, target + PARTIAL)
    if found == "something else" or (found == "others" and not allow_other_files):
        raise CheckpointExists(
            f"{target} exists and is not a checkpoint, so not even overwrite=True replaces it: "
            "choose another path"
        )
