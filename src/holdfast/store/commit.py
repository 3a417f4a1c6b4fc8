"""The commit protocol: how a checkpoint becomes durable, all or nothing.

For a checkpoint that shall appear at ``D`` in directory ``P``, one process:

1. Make ``D.partial`` in ``P``, or rename a retired checkpoint to it to write over its files. Nobody reads a
   name that ends in ``.partial``, so nothing before step 5 can be taken for a checkpoint.
2. Write the shard. Its bytes come from the caller's memory; checksums are computed on the way.
3. Write the manifest, which holds the checksums.
4. Sync the shard, the manifest, and the directory ``D.partial``: all there is to the checkpoint is durable.
5. Rename ``D.partial`` to ``D``. **This is the commit.** (Replacing an old one: exchange the two names.)
6. Sync ``P``. Now, and only now, the save is reported durable.

A crash before the rename reached the disk leaves ``D.partial``, which the next writer sweeps away; after it,
a whole checkpoint. The rename cannot reach the disk before what step 4 synced. ``D.partial`` itself needs no
sync of ``P``: nobody relies on it until step 6 syncs the same directory.

A sync that fails is final: the kernel may have dropped the dirty pages, and a second sync would lie. The save
fails, what it left is removed, and what was there before has not been touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast import engine
from holdfast.engine import CHUNK_NBYTES, Tuning, WriteJob, fs
from holdfast.errors import CheckpointExists, RunLocked
from holdfast.format.checksums import digest
from holdfast.format.manifest import encode_root, shard_name
from holdfast.format.records import Alias, Fragment, Leaf, Part, Root, ShardFile
from holdfast.plan import ShardPlan, plan_shard
from holdfast.state import Flat, LeafSource
from holdfast.store.failures import saving

MANIFEST = "manifest.json"
PARTIAL = ".partial"
_SHARD = shard_name(0, 0)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of a commit went: bytes to the device, syncs of the files, and all the rest."""

    write: float
    sync: float
    commit: float


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a save did. `nbytes` counts the leaves, `stored_nbytes` the files."""

    path: str
    step: int
    id: str
    created: float
    metrics: Mapping[str, float]
    leaves: int
    nbytes: int
    stored_nbytes: int
    seconds: float
    phases: Seconds


class Watch:
    """What a caller wants to know, and to do, while a commit is under way. This one wants nothing."""

    def writing(self, plan: ShardPlan, job: WriteJob) -> None:
        """The engine reads the sources from now on."""

    def written(self) -> None:
        """The engine has let go of the sources. What is raised here fails the save."""


@dataclass(slots=True)
class _Partial:
    """``D.partial`` while it is ours. `recycle`: it holds files to write over.

    Not `settled`: ``D`` and ``D.partial`` have changed names, and which has which on the disk is not certain.
    Then neither may be removed: it could be the checkpoint that is to be replaced.
    """

    recycle: bool
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Commit:
    """One checkpoint to be committed. `spare`: a retired one whose files may be written over."""

    target: str
    step: int
    metrics: Mapping[str, float]
    tuning: Tuning
    spare: str | None = None
    overwrite: bool = False

    @property
    def partial(self) -> str:
        return self.target + PARTIAL

    @property
    def parent(self) -> str:
        return os.path.dirname(self.target)

    def run(
        self, flat: Flat, groups: Sequence[Sequence[LeafSource]] | None = None, watch: Watch | None = None
    ) -> CheckpointInfo:
        """Save a state taken apart; returns when it is durable. Else raises and leaves nothing behind.

        `groups`: the same leaves in the order in which they shall leave memory.
        """
        began = time.perf_counter()
        check_step(self.step)
        plan = plan_shard([flat.leaves] if groups is None else groups)
        with saving(self.target):
            self._refuse_existing()
            fs.anchor(self.parent, once=True)
            # Choosing may write a trial file, so it comes before there is anything to clean up.
            tuning = self.tuning
            if plan.nbytes > tuning.small_nbytes or tuning.backend is not None:
                tuning = replace(tuning, backend=engine.choose_backend(self.parent, tuning.backend))
            with self._own_partial() as partial:
                writing = time.perf_counter()
                root, manifest_nbytes, synced = self._write(
                    flat, plan, tuning, watch or Watch(), recycle=partial.recycle
                )
                syncing = time.perf_counter()
                self._publish(partial)
        ended = time.perf_counter()
        phases = Seconds(syncing - writing - synced, synced, ended - began - (syncing - writing))
        return CheckpointInfo(
            path=self.target,
            step=self.step,
            id=root.id,
            created=root.created,
            metrics=dict(self.metrics),
            leaves=len(flat.leaves),
            nbytes=sum(leaf.nbytes for leaf in flat.leaves),
            stored_nbytes=plan.nbytes + manifest_nbytes,
            seconds=ended - began,
            phases=phases,
        )

    def _refuse_existing(self) -> None:
        if not self.overwrite and os.path.lexists(self.target):
            raise CheckpointExists(
                f"{self.target} exists and checkpoints are immutable: "
                "choose another path, or pass overwrite=True to replace it atomically"
            )

    @contextlib.contextmanager
    def _own_partial(self) -> Iterator[_Partial]:
        """Step 1, and the clean-up when anything after it fails."""
        lock = self._take_spare()
        partial = _Partial(recycle=lock is not None)
        if lock is None:
            lock = self._make_partial()
        try:
            yield partial
        except BaseException:
            # What cannot be removed now is swept by the next writer; the failure to report is the first one.
            if partial.settled:
                with contextlib.suppress(OSError):
                    fs.remove_tree(self.partial)
            raise
        finally:
            unlock_directory(lock)

    def _take_spare(self) -> int | None:
        """Renames the spare to ``D.partial``. None: there is no spare, or somebody still reads it."""
        lock = None if self.spare is None else try_lock_directory(self.spare)
        if self.spare is None or lock is None:
            return None
        try:
            if os.path.lexists(self.partial):
                self._remove_leftover()
            fs.rename(self.spare, self.partial)
        except BaseException:
            unlock_directory(lock)
            raise
        return lock

    def _make_partial(self) -> int:
        try:
            fs.mkdir(self.partial)
        except FileExistsError:
            self._remove_leftover()
            fs.mkdir(self.partial)
        return self._lock_partial()

    def _remove_leftover(self) -> None:
        """Removes what a failed or crashed save left. A live one may be at work there: the lock tells."""
        leftover = self._lock_partial()
        try:
            # It may be what such a save has replaced: its names must be durable before its files go.
            fs.sync_dir(self.parent)
            fs.remove_tree(self.partial)
        finally:
            unlock_directory(leftover)

    def _lock_partial(self) -> int:
        lock = try_lock_directory(self.partial)
        if lock is None:
            raise RunLocked(f"another process is saving to {self.target}; one writer per checkpoint")
        return lock

    def _write(
        self, flat: Flat, plan: ShardPlan, tuning: Tuning, watch: Watch, *, recycle: bool
    ) -> tuple[Root, int, float]:
        """Steps 2 to 4. Returns the manifest, its size, and the seconds that the syncs took."""
        if recycle:
            self._drop_strangers()
        job = engine.write(
            os.path.join(self.partial, _SHARD),
            plan.nbytes,
            plan.pieces(),
            tuning=tuning,
            header=plan.header,
            recycle=recycle,
            background=plan.nbytes > tuning.small_nbytes,
        )
        try:
            watch.writing(plan, job)
            job.wait()
            watch.written()
        except BaseException:
            job.abandon()  # the engine must not go on reading memory that the caller goes on to change
            raise
        root = self._describe(flat, plan, job.checksums())
        encoded = encode_root(root)
        manifest = fs.write_file(os.path.join(self.partial, MANIFEST), encoded, recycle=recycle)
        began = time.perf_counter()
        fs.sync([job, manifest], self.partial)
        return root, len(encoded), time.perf_counter() - began

    def _drop_strangers(self) -> None:
        for name in os.listdir(self.partial):
            if name not in (MANIFEST, _SHARD):
                fs.unlink(os.path.join(self.partial, name))

    def _describe(self, flat: Flat, plan: ShardPlan, checksums: list[str]) -> Root:
        leaves = tuple(
            Leaf(
                leaf.name,
                leaf.dtype,
                leaf.shape,
                leaf.framework,
                (Fragment((0,) * len(leaf.shape), leaf.shape, 0, offset, leaf.nbytes, chunks),),
            )
            for leaf, offset, chunks in zip(plan.leaves, plan.offsets, checksums, strict=True)
        )
        shard = ShardFile(_SHARD, plan.nbytes, len(plan.header), digest(plan.header))
        aliases = tuple(Alias(name, of) for name, of in flat.aliases)
        return Root(
            id=os.urandom(16).hex(),
            step=self.step,
            created=time.time(),
            metrics=dict(self.metrics),
            tree=flat.tree,
            part=Part(0, CHUNK_NBYTES, (shard,), leaves, aliases),
        )

    def _publish(self, partial: _Partial) -> None:
        """Steps 5 and 6. A failed sync takes the name back: what has failed must not be found."""
        replaces = self.overwrite and os.path.lexists(self.target)
        move = fs.exchange if replaces else fs.rename
        partial.settled = False
        try:
            move(self.partial, self.target)
        except OSError:
            partial.settled = True
            raise
        try:
            fs.sync_dir(self.parent)
        except OSError:
            move(self.target, self.partial)
            fs.sync_dir(self.parent)  # no second try of the first: the names have changed again
            partial.settled = True
            raise
        partial.settled = True
        if replaces:
            with contextlib.suppress(OSError):  # durable already; the next save to this path sweeps it
                fs.remove_tree(self.partial)


def check_step(step: int) -> None:
    """Steps are what directory names can hold, twelve digits."""
    if type(step) is not int or not 0 <= step < 10**12:
        raise ValueError(f"step must be an int from 0 to 10**12 - 1, not {step!r}")


def try_lock_directory(path: str, kind: int = fcntl.LOCK_EX) -> int | None:
    """Holds a directory until the descriptor is given to `unlock_directory`; None when somebody else does.

    Writers hold a checkpoint's directory exclusively while they write into it, readers share it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
            if kind == fcntl.LOCK_EX:
                _exclusive.add(descriptor)
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or renamed or removed by its holder just now: not ours either way
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def unlock_directory(descriptor: int) -> None:
    """Said aloud: closing alone would leave the lock to a child forked meanwhile, for as long as it lives."""
    _exclusive.discard(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


_exclusive: set[int] = set()


def _leave_locks_to_the_parent() -> None:
    """In a forked child: were the parent killed while it writes, the child would hold its directories."""
    while _exclusive:
        os.close(_exclusive.pop())


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)
