"""The training program that the training suite kills and restarts: it resumes what it finds and trains on.

It runs as a process of its own and reports, one JSON message per line, when each part of its start was done.
Times are readings of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.study.states import Gpt2

if TYPE_CHECKING:
    from holdfast.study.training_model import Trainer

Save = Callable[[int], object]


class Order(msgspec.Struct, frozen=True):
    """What to train, and with which checkpoints; the program's one argument, as JSON."""

    directory: str
    system: str
    shape: Gpt2
    batch: int
    sequence: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Training goes on after `completed` steps. The three times are when each part of the start ended."""

    completed: int
    imported: float
    built: float
    restored: float


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A step ended at `ended`, and after it the call that saves it has returned."""

    step: int
    ended: float


def open_holdfast(directory: Path, trainer: Trainer) -> tuple[int, Save]:
    import holdfast

    checkpointer = holdfast.Checkpointer(
        directory / "run",
        trainer.state,
        mode="overlap",
        keep=holdfast.Keep(last=2),
        preemption=False,  # this process ends when its parent says so
    )
    return checkpointer.restore(), checkpointer.save


def open_torch(directory: Path, trainer: Trainer) -> tuple[int, Save]:
    """`torch.save` over two names in turns; `torch.load` of the newer one, or the other if that is torn."""
    import torch

    from holdfast.study.peers.base import sync_tree
    from holdfast.study.peers.training import state_dicts

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


def train(order: Order) -> None:
    """Trains until it is killed, with a checkpoint after every step."""
    import torch  # noqa: F401  (part of what is timed as imports)

    import holdfast
    from holdfast.study.training_model import Load, Trainer

    if order.system == "holdfast":
        holdfast.Checkpointer  # noqa: B018  (imported on first use)
    imported = time.monotonic()
    trainer = Trainer(order.shape)
    built = time.monotonic()
    step, save = SYSTEMS[order.system](Path(order.directory), trainer)
    _report(Ready(step, imported, built, time.monotonic()))
    load = Load(order.batch, order.sequence)
    while True:
        step += 1
        trainer.forward_backward(trainer.draw(load))
        trainer.update()
        ended = time.monotonic()
        save(step)
        _report(Stepped(step, ended))


def _report(message: Ready | Stepped) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    train(msgspec.json.decode(sys.argv[1], type=Order))
