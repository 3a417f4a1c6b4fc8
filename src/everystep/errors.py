"""Every error Everystep raises.

Each derives from `EverystepError` and from the builtin a caller would expect, so both
``except everystep.EverystepError`` and ``except OSError`` do what they say. The docstring of a type
says what to do about it; the message says what happened, where, and what is still safe.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any


class EverystepError(Exception):
    """Base of all errors raised by Everystep."""


class CorruptCheckpoint(EverystepError, ValueError):
    """Stored bytes are not what was written, or a file is not what its format says.

    Restore an older checkpoint (`Checkpointer.restore` does so by itself) and look at the device: ``everystep
    verify PATH`` lists everything that is damaged.

    Attributes:
        reason: What is wrong.
        path: The file, if it is known.
        leaf: The leaf, if it is known.
    """

    def __init__(self, reason: str, *, path: str | None = None, leaf: str | None = None) -> None:
        self.reason = reason
        self.path = path
        self.leaf = leaf
        where = "".join(
            [f" in {path}" if path is not None else "", f", leaf {leaf!r}" if leaf is not None else ""]
        )
        super().__init__(f"corrupt checkpoint{where}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors are sent from rank to rank; made again of its message, this one would say it twice."""
        return _corrupt, (type(self), self.reason, self.path, self.leaf)


def _corrupt(
    kind: type[CorruptCheckpoint], reason: str, path: str | None, leaf: str | None
) -> CorruptCheckpoint:
    return kind(reason, path=path, leaf=leaf)


def _with_errno(error: OSError) -> tuple[Any, ...]:
    """For pickle: made again of its message alone, an `OSError` would have lost what was set beside it."""
    beside = {"errno": error.errno, "filename": error.filename}
    known = {name: value for name, value in beside.items() if value is not None}
    return type(error), error.args, {**error.__dict__, **known}


class IncompleteCheckpoint(CorruptCheckpoint, FileNotFoundError):
    """A file that the checkpoint needs is missing, or this was never a committed checkpoint.

    A ``.partial`` directory is a save that did not finish. Nothing in it was reported durable.

    Attributes:
        out_of_reach: The file is on a volume of a host that does not take part, so it may be intact.
            `Checkpointer.restore` does not pass over such a checkpoint: bring the host or its volume back.
    """

    out_of_reach = False


class CheckpointNotFound(EverystepError, FileNotFoundError):
    """There is no checkpoint at that path. Check the path; ``everystep ls RUN`` lists what a run holds."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOENT


class UnsupportedCheckpoint(EverystepError, NotImplementedError):
    """An intact checkpoint that this version of Everystep cannot read. Upgrade Everystep."""


class CheckpointClosed(EverystepError, ValueError):
    """A read from a checkpoint after its `close`. Read inside the ``with`` block."""


class LeafNotFound(EverystepError, KeyError):
    """The checkpoint has no leaf of that name. ``everystep show PATH`` lists its leaves."""

    # KeyError would print the message in quotes.
    def __str__(self) -> str:
        return str(self.args[0])


class StateMismatch(EverystepError, ValueError):
    """The checkpoint and the state it should fill do not fit.

    Fix the target, or pass ``strict=False`` if the call has it: then what fits is restored, and this is
    raised only if nothing fits.

    Attributes:
        missing: Leaves that the target has and the checkpoint does not.
        extra: Leaves that the checkpoint has and the target does not.
        wrong: Leaves that differ in shape or type.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        wrong: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.extra = tuple(extra)
        self.wrong = tuple(wrong)


class UnsupportedSource(EverystepError, ValueError):
    """A foreign checkpoint that Everystep cannot read: its files, a class in it, or its layout are not known.

    The message says what was looked for and found. Name the kind (``--kind``), or convert it to a known one.
    """


class DecompressionBomb(UnsupportedSource):
    """The arrays of a foreign checkpoint would take many times the bytes of its files: it may be a trap.

    Nothing of it was read. If you trust its origin, allow it: ``Options(max_inflation=...)``, or
    ``--max-inflation`` of the command.
    """


class UnsupportedURL(EverystepError, ValueError):
    """A URL (``s3://bucket/run``) was given for a path. Everystep reads and writes file systems.

    Nothing was read or written. Give the path of a directory, on a local disk or a mounted file system; for
    ``file://``, the path without the scheme.
    """


class UnsupportedState(EverystepError, TypeError):
    """A value in the state has a type Everystep does not store. The message names its place and type.

    Convert it to a supported type, or give the object ``state_dict``/``load_state_dict`` methods.
    """


class SpecError(EverystepError, ValueError):
    """A layout rule is wrong, does not fit a parameter, or leaves one out. The message lists the names.

    ``everystep spec check FILE SRC`` says which rule takes which parameter.

    Attributes:
        names: The parameters concerned.
    """

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class SaveFailed(EverystepError, OSError):
    """A save did not become durable. Earlier checkpoints are untouched; the cause is chained.

    Every failure of a save has this type. Wrong arguments raise `ValueError`, `TypeError` or
    `UnsupportedState` instead: the same call can never succeed.

    After a failed sync the device's state is unknown, so Everystep never retries that save by itself.
    """

    # OSError would print its errno and filename, which callers may want, instead of the message.
    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_errno(self)


class CheckpointExists(SaveFailed, FileExistsError):
    """Checkpoints are immutable: something is already at that path.

    Choose another path, or pass ``overwrite=True`` to replace it atomically.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.EEXIST


class Locked(SaveFailed, BlockingIOError):
    """Another live process writes to this run, or to a checkpoint at this path. The message names it.

    A run, and a checkpoint, has one writer at a time. Wait for the other one, or end it.
    """


class RunInUse(SaveFailed, FileExistsError):
    """The run holds checkpoints, and this training neither resumed from one nor asked to start over.

    Nothing was saved and nothing was changed. Call `Checkpointer.restore` before the first save to go on from
    the newest one; use another directory for a new training; or make the Checkpointer with
    ``start_over=True``, which removes the old checkpoints once the first new one is durable.

    Attributes:
        steps: The steps that the run holds.
    """

    def __init__(self, message: str, *, steps: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.errno = errno.EEXIST
        self.steps = tuple(steps)


class MutatedDuringSave(SaveFailed):
    """Weights changed while they were being written, without a hooked optimizer's step to announce it.

    That save failed, nothing wrong was stored, and training goes on. To have the leaves read in place,
    bracket the change with ``with checkpointer.update():``, or give the optimizer to the Checkpointer
    (``optimizers=``).

    Attributes:
        leaves: What changed. The Checkpointer copies these from now on.
    """

    def __init__(self, message: str, *, leaves: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.leaves = tuple(leaves)


class DeviceTimeout(SaveFailed, TimeoutError):
    """The device did not finish a save in time, so training went on without that save.

    Earlier checkpoints are untouched. Look at the device (``everystep doctor``), save less often, or raise
    the Checkpointer's ``timeout``.
    """


class StorageFull(SaveFailed):
    """The device has no space for the checkpoint. Free space, or keep fewer checkpoints (`Keep`).

    A `Checkpointer` has already removed what it could: all but the newest durable checkpoint, and those that
    `Keep` holds for good.
    """


class StorageDenied(SaveFailed, PermissionError):
    """This user cannot write there (read-only, wrong owner). The message says what to change."""


class RunMoved(SaveFailed):
    """The path of a run, or of the directory to save into, leads elsewhere than when it was opened.

    The run was renamed, another directory was mounted or put in its place, or a link was re-pointed. Nothing
    was changed in what is at the path now. What was saved before is untouched, and the message says where it
    is. Let the path lead back there, and saves go on; or close the Checkpointer, and open another one.
    """


class StorageMissing(SaveFailed, FileNotFoundError):
    """The directory to save into does not exist. Create it, or check that its volume is mounted."""


class ReadFailed(EverystepError, OSError):
    """The device or filesystem failed while reading. The bytes may still be intact: see the cause.

    An error of the device (``EIO``) is raised after three attempts; `Checkpointer.restore` treats it as
    damage. It raises everything else, and falls back to no older checkpoint: the newest may be intact.
    """

    # OSError would print its errno and filename, which callers may want, instead of the message.
    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_errno(self)


class ReadDenied(ReadFailed, PermissionError):
    """This user cannot read there (wrong owner or mode). The message says what to change."""


class OutOfResources(ReadFailed):
    """The system lacked what reading takes: file descriptors, memory or address space, threads.

    It says nothing about the stored bytes, so `Checkpointer.restore` does not fall back to an older one.
    Raise the limit that the message names (``ulimit``), or free some, and try again.
    """


class CorruptShelf(EverystepError, ValueError):
    """A shelf is damaged: a file cut short, or bytes that are not what was stored.

    ``everystep shelf verify FILE`` lists what is damaged. Other entries can still be read and exported.

    Attributes:
        reason: What is wrong.
        path: The file, if it is known.
        name: The entry, if it is known.
    """

    def __init__(self, reason: str, *, path: str | None = None, name: str | None = None) -> None:
        self.reason = reason
        self.path = path
        self.name = name
        where = "".join(
            [f" {path}" if path is not None else "", f", entry {name!r}" if name is not None else ""]
        )
        super().__init__(f"corrupt shelf{where}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _corrupt_shelf, (self.reason, self.path, self.name)


def _corrupt_shelf(reason: str, path: str | None, name: str | None) -> CorruptShelf:
    return CorruptShelf(reason, path=path, name=name)


class UnsupportedShelf(EverystepError, NotImplementedError):
    """A file that is not a shelf, or a shelf of a newer version of Everystep. Check the path, or upgrade."""


class ShelfNotFound(EverystepError, FileNotFoundError):
    """There is no shelf at that path to read. Only a writer makes a new one."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOENT


class ShelfFull(EverystepError, OSError):
    """The change does not fit the shelf's `size`. Nothing is lost: the last commit is as it was.

    Open the shelf with a larger ``size``, delete entries, or let readers go of old arrays: the space of what
    was replaced is free again once no reader uses it.
    """

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_errno(self)


class ShelfClosed(EverystepError, ValueError):
    """The shelf was closed, or belongs to the process that this one was forked from. Open it again."""


class TransactionError(EverystepError, RuntimeError):
    """A shelf cannot be changed here. The message says why, and what to do instead.

    Causes are a second transaction while one is under way, a change by another thread meanwhile, `writable`
    outside a transaction, or a change to a shelf that was opened for reading.
    """


class EngineTimeout(EverystepError, TimeoutError):
    """A job did not finish in the time given to `wait`. It goes on in the background."""


class EngineUnavailable(EverystepError, RuntimeError):
    """The requested backend cannot be used here. ``everystep doctor DIR`` says which can, and why."""


class UnsupportedVersion(EverystepError, ImportError):
    """The installed version of another library is not one that Everystep was tested with.

    The message names the version and those that are supported. Install one of these, or a newer Everystep.
    """


class RankFailed(EverystepError, ConnectionError):
    """Another rank failed, or did not answer in time.

    If a save raises it, nothing of that save is committed, unless the message says so, and earlier
    checkpoints are untouched. Training may go on if the other rank does. If the rank is dead, launch again:
    training resumes from the last durable step, with fewer ranks as well.

    Attributes:
        ranks: The ranks concerned.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankTimeout(RankFailed, TimeoutError):
    """Another rank did not answer in time: it has ended, hangs, or does something else."""


class RanksDisagree(EverystepError, ValueError):
    """Ranks do not do, or do not hold, the same where they must.

    The message says which rank differs in what. Mark state that should differ with `everystep.per_rank`.

    Attributes:
        leaf: The leaf that they describe or hold differently, if there is one.
        ranks: Some of the ranks concerned.
    """

    def __init__(self, message: str, *, leaf: str | None = None, ranks: Sequence[int] = ()) -> None:
        self.leaf = leaf
        self.ranks = tuple(ranks)
        super().__init__(message if leaf is None else f"leaf {leaf!r}: {message}")


class SaveFailedOnRank(SaveFailed, RankFailed):
    """A save failed because another rank failed. Earlier checkpoints are untouched; see `RankFailed`."""


class SaveTimedOut(SaveFailedOnRank, RankTimeout):
    """A save failed because another rank did not answer in time. Earlier checkpoints are untouched."""


class SaveRejected(SaveFailed, RanksDisagree):
    """A save was rejected because ranks do not hold, or do not do, the same. See `RanksDisagree`."""


def as_save_failure(error: BaseException) -> BaseException:
    """The same error as a `SaveFailed`, for one that ranks also raise outside of a save."""
    if isinstance(error, SaveFailed) or not isinstance(error, (RankFailed, RanksDisagree)):
        return error
    if isinstance(error, RanksDisagree):
        rejected = SaveRejected(str(error), ranks=error.ranks)
        rejected.leaf = error.leaf
        return rejected
    kind = SaveTimedOut if isinstance(error, RankTimeout) else SaveFailedOnRank
    return kind(str(error), ranks=error.ranks)
