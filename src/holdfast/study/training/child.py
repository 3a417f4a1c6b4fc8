"""The training program of the recovery measurement: it resumes what it finds, trains on, and is killed.

It runs as a process of its own and tells its parent, one JSON message per line, when each part of its start
was done. Times are readings of the monotonic clock, which all processes of a machine share. Restarting it
and doing the sums is left to `recovery`.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.study.states import Gpt2

if TYPE_CHECKING:
    from holdfast.study.training.model import Trainer


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Training goes on after `completed` steps. The three times are when each part of the start ended."""

    completed: int
    imported: float
    built: float
    restored: float


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A step has ended at `ended`, and after it the call that saves it has returned."""

    step: int
    ended: float


Message = Ready | Stepped
Save = Callable[[int], object]


def open_holdfast(directory: Path, trainer: Trainer, mode: str) -> tuple[int, Save]:
    import holdfast

    checkpointer = holdfast.Checkpointer(
        directory / "run",
        trainer.state,
        mode=mode,  # type: ignore[arg-type]
        keep=holdfast.Keep(last=2),
        preemption=False,  # this process ends when its parent says so
    )
    return checkpointer.restore(), checkpointer.save


def open_torch(directory: Path, trainer: Trainer, mode: str) -> tuple[int, Save]:
    """`torch.save` over two names in turns; `torch.load` of the newer one, or the other if that is torn."""
    import torch

    from holdfast.study.peers import sync_tree
    from holdfast.study.training.arms import state_dicts

    def save(step: int) -> None:
        path = directory / f"{step % 2}.pt"
        torch.save(state_dicts(trainer) | {"step": step}, path)
        sync_tree(path)

    newest_first = sorted(directory.glob("?.pt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in newest_first:
        try:
            loaded: dict[str, Any] = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            continue  # the kill came in the middle of its save
        trainer.model.load_state_dict(loaded["model"])
        trainer.optimizer.load_state_dict(loaded["optimizer"])
        return int(loaded["step"]), save
    return 0, save


SYSTEMS = {"holdfast": open_holdfast, "torch": open_torch}


def train(directory: Path, system: str, shape: Gpt2, batch: int, sequence: int, mode: str) -> None:
    """Trains until it is killed, a checkpoint after every step."""
    import torch  # noqa: F401  (part of what is timed as imports)

    import holdfast
    from holdfast.study.training.model import Load, Trainer

    if system == "holdfast":
        holdfast.Checkpointer  # noqa: B018  (imported on first use)
    imported = time.monotonic()
    trainer = Trainer(shape)
    built = time.monotonic()
    completed, save = SYSTEMS[system](directory, trainer, mode)
    report(Ready(completed, imported, built, time.monotonic()))
    load = Load(batch, sequence)
    step = completed
    while True:
        step += 1
        trainer.forward_backward(trainer.draw(load))
        trainer.update()
        ended = time.monotonic()
        save(step)
        report(Stepped(step, ended))


def report(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.study.training.child", description=train.__doc__
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--system", choices=sorted(SYSTEMS), required=True)
    parser.add_argument("--mode", default="overlap")
    for name in ("layers", "width", "vocabulary", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    shape = Gpt2(given.width, given.layers, given.vocabulary)
    train(given.directory, given.system, shape, given.batch, given.sequence, given.mode)


if __name__ == "__main__":
    main()
