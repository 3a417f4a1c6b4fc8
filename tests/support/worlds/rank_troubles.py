"""What goes wrong on one rank and not on the others, for the ranks of one world, one trouble after the other.

All ranks run the same list of troubles. In each, all save, something is wrong with one of them, and what each
rank got is noted; then all save again, which must succeed. So one launch tells a lot.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import everystep
from everystep.engine import faults
from support.worlds.disturbed_trainings import (
    Mode,
    advance,
    bits,
    error_of,
    leftovers,
    make_state,
    set_patience,
)
from support.worlds.patience import PATIENCE_SECONDS, expecting, said_together

Got = tuple[str, str, tuple[int, ...]]

SILENCE_SECONDS = 2.0


@dataclass(slots=True)
class Bench:
    """A rank with a run, between two troubles."""

    rank: int
    checkpointer: everystep.Checkpointer
    state: dict[str, Any]
    step: int = 0
    got: dict[str, Got] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def meet(self) -> None:
        """All ranks are here."""
        import torch.distributed as dist

        dist.barrier()

    def save(self, step: int | None = None) -> None:
        """One step of training and its save, to the end. With `step`, as if that were its number."""
        self.step += 1
        advance(self.state)
        self.checkpointer.save(self.step if step is None else step)
        self.checkpointer.wait()

    def trouble(self, name: str, act: Callable[[], Any]) -> None:
        """Something that fails on all ranks; then a save that must succeed, with nothing left behind."""
        self.meet()
        before = self.checkpointer.steps
        self.meet()
        self.got[name] = error_of(act)
        self.meet()
        after = self.checkpointer.steps
        if not set(before) <= set(after):
            self.notes.append(f"{name}: of {before} only {after} are left")
        self.meet()
        self.recover(name)

    def recover(self, name: str) -> None:
        self.save()
        self.meet()
        run = Path(self.checkpointer.path)
        if self.checkpointer.steps[-1] != self.step:
            self.notes.append(f"{name}: step {self.step} is not there after it")
        if any(left.endswith(".partial") for left in leftovers(run)):
            self.notes.append(f"{name}: it left {leftovers(run)}")
        other = make_state()
        everystep.load(run / f"step-{self.step:012d}", other, process_group="none", strict=False)
        if bits(other)[1:] != bits(self.state)[1:]:
            self.notes.append(f"{name}: step {self.step} is not what was saved")
        self.meet()

    @contextmanager
    def impatient(self, seconds: float = SILENCE_SECONDS) -> Iterator[None]:
        """A short time-out, where it is silence that shall be noticed. Begins and ends with all others."""
        self.meet()
        set_patience(self.checkpointer, seconds)
        try:
            yield
        finally:
            self.meet()
            set_patience(self.checkpointer, PATIENCE_SECONDS)


@contextmanager
def bench(run: Path, mode: Mode = "sync", **options: Any) -> Iterator[Bench]:
    """A rank with two checkpoints."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    state = make_state()
    with everystep.Checkpointer(
        run,
        state,
        mode=mode,
        keep=everystep.Keep(last=100),
        timeout=PATIENCE_SECONDS,
        options=everystep.Options(**options),
    ) as checkpointer:
        found = Bench(dist.get_rank(), checkpointer, state)
        for _ in range(2):
            found.save()
        yield found


def report(found: Bench) -> tuple[dict[str, Got], list[str]]:
    return found.got, found.notes


# --- a device that fails


def failing_device(
    run: Path, mode: Mode, troubles: list[tuple[int, str]]
) -> tuple[dict[str, Got], list[str]]:
    """A fault of the file system on one rank, for each of the troubles."""
    with bench(run, mode) as here:
        for rank, fault in troubles:

            def act(rank: int = rank, fault: str = fault) -> None:
                with faults.injected(fault if rank == here.rank else ""):
                    here.save()

            here.trouble(f"{fault} on {rank}", act)
        return report(here)


# --- ranks that do not do the same


class _Odd:
    """Nothing that can be stored."""


def disagreeing(run: Path, mode: Mode) -> tuple[dict[str, Got], list[str]]:
    """Ranks that save, but not the same: all learn of it at once."""
    import torch

    with bench(run, mode) as here:

        def unsupported(rank: int) -> Callable[[], None]:
            def act() -> None:
                if here.rank == rank:
                    here.state["odd"] = _Odd()
                try:
                    here.save()
                finally:
                    here.state.pop("odd", None)

            return act

        here.trouble("unsupported on 1", unsupported(1))
        here.trouble("unsupported on 0", unsupported(0))

        def unsupported_at_first() -> None:
            here.checkpointer._group.shares.forget()
            unsupported(1)()

        here.trouble("unsupported on 1, replanned", unsupported_at_first)

        def another_value() -> None:
            here.state["lr"] = 0.5 if here.rank == 1 else 0.25
            try:
                here.save()
            finally:
                del here.state["lr"]

        here.trouble("values of 1", another_value)

        def another_copy() -> None:
            here.checkpointer._group.shares.forget()
            kept = here.state["model"][0].detach().clone()
            with torch.no_grad():
                here.state["model"][0][3, 3] += here.rank == 2
            try:
                here.save()
            finally:
                with torch.no_grad():
                    here.state["model"][0].copy_(kept)
                here.state["optimizer"].state.clear()  # one has made its step and another has not

        here.trouble("copy of 2", another_copy)
        return report(here)


IN_VAIN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # Who waits in vain, and for whom not: only the first can run out of time.
    "1 skips": ((0,), (2,)),
    "0 skips": ((1, 2), ()),
    "2 skips, replanned": ((0,), (1,)),
    "1 ahead": ((1,), (0,)),
    "1 behind": ((0,), (2,)),
    "0 ahead": ((0,), ()),
    "0 behind": ((1, 2), (0,)),
    "bad step on 1": ((0,), (2,)),
}


def missing(run: Path, mode: Mode, troubles: list[str]) -> tuple[dict[str, Got], list[str]]:
    """Ranks that do not come, or come with another step."""
    with bench(run, mode) as here:

        def skips(rank: int) -> Callable[[], None]:
            def act() -> None:
                if here.rank != rank:
                    here.save()
                    return
                here.step += 1
                advance(here.state)

            return act

        def ahead(rank: int) -> Callable[[], None]:
            return lambda: here.save(here.step + 2) if here.rank == rank else here.save()

        def behind(rank: int) -> Callable[[], None]:
            return lambda: here.save(here.step) if here.rank == rank else here.save()

        def bad_step() -> None:
            here.save(-1 if here.rank == 1 else None)

        def planned_without() -> None:
            here.checkpointer._group.shares.forget()
            skips(2)()

        def called(act: Callable[[], None]) -> Callable[[], None]:
            """For who waits for the next call in vain: its time begins when it has heard of this one."""

            def when_called() -> None:
                group = here.checkpointer._group
                assert group.meeting is not None
                assert group._line is not None
                group.meeting.messages.read(f"{group._line.next}/told/1", PATIENCE_SECONDS)
                act()

            return when_called

        acts = {
            "1 skips": skips(1),
            "0 skips": skips(0),
            "2 skips, replanned": planned_without,
            "1 ahead": ahead(1),
            "1 behind": behind(1),
            "0 ahead": ahead(0),
            "0 behind": behind(0),
            "bad step on 1": bad_step,
        }
        for name in troubles:
            waiting, coming = IN_VAIN[name]
            act, seconds = acts[name], PATIENCE_SECONDS
            if here.rank in waiting:
                act, seconds = called(act) if 0 in coming else act, SILENCE_SECONDS
            with here.impatient(seconds), expecting(*coming):
                here.got[name] = error_of(act)
            here.recover(name)
        return report(here)


def straggling(run: Path, mode: Mode) -> tuple[dict[str, Got], list[str]]:
    """A rank is so slow to write that it is given up; it gets there when the same step is saved again."""
    from torch.distributed.distributed_c10d import _get_default_store

    from everystep.store.commit.shard_writer import ShardWriter
    from everystep.store.ranks.meeting import Meeting

    store = _get_default_store()
    start, gather = ShardWriter.start, Meeting.gather
    with bench(run, mode) as here:

        def late(self: ShardWriter, directory: Any, *, recycle: bool) -> None:
            ShardWriter.start = start  # type: ignore[method-assign]
            store.wait(["called again"])
            start(self, directory, recycle=recycle)

        def wait_for_all(self: Meeting) -> Any:
            store.set("called again", b"")
            return gather(self)

        if here.rank == 1:
            ShardWriter.start = late  # type: ignore[method-assign]
        meeting = here.checkpointer._group.meeting
        assert meeting is not None
        here.meet()
        if here.rank == 0:
            meeting.timeout = SILENCE_SECONDS
        with expecting(2):
            here.got["late"] = error_of(here.save)
        meeting.timeout = PATIENCE_SECONDS
        if here.rank == 0:
            Meeting.gather = wait_for_all  # type: ignore[method-assign]
        here.got["again"] = error_of(lambda: here.checkpointer.save(here.step))
        here.got["again, durable"] = error_of(here.checkpointer.wait)
        here.meet()
        if here.checkpointer.steps[-1] != here.step or any(".partial" in left for left in leftovers(run)):
            here.notes.append(f"{here.checkpointer.steps} and {leftovers(run)}")
        here.meet()
        here.recover("after it")
        return report(here)


def mutated(run: Path) -> tuple[dict[str, Got], list[str]]:
    """Weights of one rank change while they are written, and nothing says so."""
    import torch

    from everystep.store.commit.shard_writer import ShardWriter

    with bench(run, "overlap") as here:

        def change(amount: float) -> None:
            with torch.no_grad():
                for parameter in here.state["model"] if here.rank == 1 else ():
                    parameter.add_(amount)
                    here.state["optimizer"].state[parameter]["momentum_buffer"].add_(amount)

        def act() -> None:
            start = ShardWriter.start

            def late(self: ShardWriter, directory: Any, *, recycle: bool) -> None:
                change(1.0)
                start(self, directory, recycle=recycle)

            ShardWriter.start = late  # type: ignore[method-assign]
            try:
                here.save()
            finally:
                ShardWriter.start = start  # type: ignore[method-assign]
                change(-1.0)

        here.trouble("mutated on 1", act)
        return report(here)


# --- once


def one_by_one(folder: Path) -> dict[str, Got]:
    """Troubles of `everystep.save` and of opening a run."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    state = make_state(1)
    got: dict[str, Got] = {}

    def other_path() -> None:
        everystep.save(folder / ("a" if rank else "b"), state, timeout=SILENCE_SECONDS)

    with said_together():
        got["another path"] = error_of(other_path)
    dist.barrier()
    got["the same path"] = error_of(lambda: everystep.save(folder / "same", state))
    got["it exists"] = error_of(lambda: everystep.save(folder / "same", state))
    unequal = {"w": torch.full((6,), float(rank == 1)), "v": torch.ones(3)}
    got["copies"] = error_of(lambda: everystep.save(folder / "copies", unequal))
    trusting = everystep.Options(replicas="trust")
    got["trusted copies"] = error_of(lambda: everystep.save(folder / "trusted", unequal, options=trusting))
    writers = everystep.Options(writers=1 if rank == 1 else "all")
    got["writers"] = error_of(lambda: everystep.save(folder / "writers", state, options=writers))
    missing = everystep.Options(volumes=[folder / "none"] if rank == 1 else [folder])
    got["volume"] = error_of(lambda: everystep.save(folder / "volume", state, options=missing))

    def open_run(path: Path) -> None:
        everystep.Checkpointer(path, state, timeout=PATIENCE_SECONDS).close()

    (folder / "file").touch()
    got["no directory"] = error_of(lambda: open_run(folder / "file" / "run"))
    alone = everystep.Checkpointer(folder / "held", state, process_group="none") if rank == 1 else None
    dist.barrier()
    got["locked"] = error_of(lambda: open_run(folder / "held"))
    dist.barrier()
    if alone is not None:
        alone.close()
    dist.barrier()
    got["unlocked"] = error_of(lambda: open_run(folder / "held"))
    return got
