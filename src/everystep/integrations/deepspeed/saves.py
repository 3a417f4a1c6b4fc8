"""One save of a tag by all ranks, without DeepSpeed: the tag appears at once and whole, or not at all.

1. Each rank writes its files into ``.TAG.partial``. Each is an Everystep checkpoint, durable by itself.
2. The ranks tell each other whether that succeeded. If one has failed, all raise, and there is no such tag.
3. The coordinator renames ``.TAG.partial`` to ``TAG`` and syncs the directory above. **This is the commit.**
4. The coordinator replaces the file ``latest`` by a new one, synced. So it only ever names complete tags.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Any, Final

from everystep.checkpointer.guard import Guard
from everystep.checkpointer.ownership import UNCHANGED
from everystep.engine.threads import Background
from everystep.errors import MutatedDuringSave, SaveFailed
from everystep.integrations.deepspeed import tags
from everystep.integrations.deepspeed.tags import TagTransaction
from everystep.paths import local_path
from everystep.state import flatten
from everystep.store import Commit, Options, Transaction, check_step, whole
from everystep.store.save_errors import saving

_WRITERS: Final = 4
"""Files that a rank writes at a time: each takes staging of its own."""
_TUNING: Final = Options().tuning()


class TagSave:
    """A save that has begun. All ranks make one, and `commit` it. One of them `is_coordinator`.

    `gather` gives each rank what every rank says, and so lets them wait for each other.
    """

    def __init__(
        self,
        folder: str,
        tag: str,
        step: int,
        gather: Callable[[str | None], list[str | None]],
        *,
        is_coordinator: bool,
    ) -> None:
        self._folder, self._tag = local_path(folder), tag
        self.path = os.path.abspath(os.path.join(self._folder, tag))
        self._step = step
        self._gather = gather
        self._transaction: TagTransaction | None = None
        self._turns: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_WRITERS):
            self._turns.put(None)
        self._writes: list[_Write] = []
        self._failure: Exception | None = None
        if is_coordinator:
            self._try(self._begin)
        gather(None)  # the directory is there

    def write(self, name: str, state: Any, *, watched: bool) -> None:
        """Begins to write a file. `watched`: the training goes on meanwhile, and must not change the state.

        If it fails, the commit raises that, on all ranks.
        """
        target = os.path.join(tags.partial_of(self.path), name)
        if self._failure is None:
            self._try(lambda: self._writes.append(_Write(self._turns, target, state, self._step, watched)))

    def commit(self, *, latest: bool) -> None:
        """Steps 2 to 4. `latest`: whether to make the fourth one."""
        for write in self._writes:
            self._try(write.wait)
        transaction, self._transaction = self._transaction, None
        try:
            self._agree()
            if transaction is not None:
                self._try(transaction.commit)
                if latest and self._failure is None:
                    self._try(lambda: tags.write_latest(self._folder, self._tag))
            self._agree()
        finally:
            if transaction is not None:
                transaction.abort()  # does nothing after the commit
                transaction.release()

    def _begin(self) -> None:
        tags.sweep(os.path.dirname(self.path))
        self._transaction = TagTransaction(self.path)
        self._transaction.open()
        self._transaction.make()

    def _try(self, act: Callable[[], object]) -> None:
        """Keeps the first failure, of whatever kind, for `_agree`: the others must not wait for this rank."""
        try:
            with saving(self.path):
                act()
        except Exception as error:
            self._failure = self._failure or error

    def _agree(self) -> None:
        """Raises on all ranks if one of them has failed."""
        failure = self._failure
        said = self._gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text is not None:
                raise SaveFailed(f"{self.path} was not saved, because of rank {rank}: {text}")


class _Write:
    """A file that a thread writes when it is its turn."""

    def __init__(
        self, turns: queue.SimpleQueue[None], path: str, state: Any, step: int, watched: bool
    ) -> None:
        flat = flatten(state)
        share = whole(flat)
        commit = Commit(Transaction(path), check_step(step), {}, _TUNING)
        self._path = path
        self._guard = Guard({UNCHANGED: list(flat.leaves)} if watched else {})

        def run() -> None:
            turns.get()
            try:
                commit.run(share)
            finally:
                turns.put(None)

        self._done = Background(run, "everystep-deepspeed")

    def wait(self) -> None:
        """Returns when it is durable. Raises what has failed."""
        self._done.result()
        if changed := self._guard.take():
            text = f"{self._path}: {', '.join(changed[:3])} changed while it was written"
            raise MutatedDuringSave(f"{text}. Save without overlap=True", leaves=changed)
