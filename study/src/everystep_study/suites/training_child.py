"""The training program that the training suite kills and restarts: it resumes what it finds and trains on.

It runs as a process of its own and reports, one JSON message per line, when each part of its start was done.
Times are readings of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from everystep_study.states import Gpt2


class Order(msgspec.Struct, frozen=True):
    """What to train, and which of the training peers saves it; the program's one argument, as JSON."""

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


def train(order: Order) -> None:
    """Trains until it is killed, with a checkpoint after every step."""
    import torch  # noqa: F401  (part of what is timed as imports)

    import everystep
    from everystep_study.peers import TRAINING
    from everystep_study.training_model import Load, Trainer

    peer = TRAINING[order.system]()
    if order.system == "overlap":
        everystep.Checkpointer  # noqa: B018  (imported on first use)
    imported = time.monotonic()
    trainer = Trainer(order.shape)
    built = time.monotonic()
    step = peer.resume(Path(order.directory), trainer)
    _report(Ready(step, imported, built, time.monotonic()))
    load = Load(order.batch, order.sequence)
    while True:
        step += 1
        trainer.forward_backward(trainer.draw(load))
        trainer.update()
        ended = time.monotonic()
        peer.save(step)
        _report(Stepped(step, ended))


def _report(message: Ready | Stepped) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    train(msgspec.json.decode(sys.argv[1], type=Order))
