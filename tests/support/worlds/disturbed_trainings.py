"""Trainings of several ranks to be disturbed: what they do, what they leave behind, and what must hold then.

A training is deterministic: from the number of completed steps alone anybody can tell all of its bits. Every
rank writes down what it knows to be durable as soon as it knows, so that its log outlives it.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import everystep
from everystep.engine import faults
from everystep.store import list_steps
from support.crashes.error_kinds import kind_of
from support.worlds.patience import PATIENCE_SECONDS, outlive

Mode = Literal["sync", "overlap"]

ROWS = 61
"""Rows of the weights: no world divides them evenly."""


def make_state(steps: int = 0) -> dict[str, Any]:
    """The state of a training after so many steps: weights, an optimizer with state of its own, values."""
    import torch

    weights = [torch.arange(ROWS * 500.0).reshape(ROWS, 500), torch.ones(3), torch.zeros(())]
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = torch.optim.SGD(parameters, lr=0.125, momentum=0.5)
    state: dict[str, Any] = {"model": parameters, "optimizer": optimizer, "step": 0}
    for _ in range(steps):
        advance(state)
    return state


def advance(state: dict[str, Any]) -> None:
    """One step of the training."""
    import torch

    state["step"] += 1
    for number, parameter in enumerate(state["model"]):
        parameter.grad = torch.full_like(parameter, (state["step"] * 37 + number) % 101 - 50.0)
    state["optimizer"].step()


def bits(state: dict[str, Any]) -> tuple[Any, ...]:
    """All of a state, to be compared."""
    momenta = state["optimizer"].state_dict()["state"]
    return (
        state["step"],
        *(parameter.detach().numpy().tobytes() for parameter in state["model"]),
        *(momenta[key]["momentum_buffer"].numpy().tobytes() for key in sorted(momenta)),
    )


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of a rank, in the save of step `at`: at a call of the file system, or at one of its messages.

    `fault`: as in ``EVERYSTEP_FAULTS``, counted from the beginning of that save. `post`: the end of the key
    of a message, and whether it has been sent. Neither: the calls are counted, and nothing happens.
    """

    rank: int
    fault: str = "any:1000000:kill"
    post: str = ""
    sent: bool = False


@dataclass(frozen=True, slots=True)
class Course:
    """What all ranks of a training do. `timeout`: in the armed save, and in those after it, others wait so
    long for the rank that is killed in it, from its death on."""

    run: Path
    steps: int
    mode: Mode = "sync"
    timeout: float = PATIENCE_SECONDS
    armed: int = 0
    kill: Kill | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def train(course: Course) -> dict[str, Any]:
    """Resumes, trains, saves every step; what a rank then knows."""
    import torch.distributed as dist

    rank = dist.get_rank()
    state = make_state()
    known = os.open(log_of(course.run, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    warnings.simplefilter("ignore")
    checkpointer = everystep.Checkpointer(
        course.run,
        state,
        mode=course.mode,
        keep=everystep.Keep(last=2),
        timeout=PATIENCE_SECONDS,
        options=everystep.Options(**course.options),
    )
    counted = 0
    with checkpointer:
        resumed = checkpointer.restore()
        found = bits(state)
        for step in range(resumed + 1, course.steps + 1):
            advance(state)
            if step == course.armed:
                dist.barrier()
            mine = step == course.armed and course.kill is not None and course.kill.rank == rank
            if mine and course.kill is not None:
                _arm(course.kill)
            elif step == course.armed and course.kill is not None and course.timeout < PATIENCE_SECONDS:
                set_patience(checkpointer, course.timeout)
                meeting = checkpointer._group.meeting
                assert meeting is not None
                outlive(course.kill.rank, meeting.membership.members[course.kill.rank].pid)
            checkpointer.save(step)
            if step >= course.armed:  # what is said next is of the step after
                checkpointer.wait()
            os.write(known, f"{checkpointer.last_durable or 0}\n".encode())
            if mine:
                counted = faults.count_calls()
                faults.install()
        checkpointer.wait()
        os.write(known, f"{checkpointer.last_durable or 0}\n".encode())
    return {"resumed": resumed, "exact": found == bits(make_state(resumed)), "calls": counted}


def set_patience(checkpointer: everystep.Checkpointer, seconds: float) -> None:
    """From now on this rank waits so long for others."""
    group = checkpointer._group
    assert group.meeting is not None
    group.timeout = checkpointer._timeout = group.meeting.timeout = seconds


def _arm(kill: Kill) -> None:
    from everystep.store.ranks.message_store import MessageStore

    faults.install(*faults.parse(kill.fault))
    if not kill.post:
        return
    post = MessageStore.post

    def fatal(self: MessageStore, key: str, data: bytes) -> None:
        if not f"{self._prefix}/{key}".endswith(kill.post):
            post(self, key, data)
            return
        if kill.sent:
            post(self, key, data)
        os.kill(os.getpid(), signal.SIGKILL)

    MessageStore.post = fatal  # type: ignore[method-assign]


def log_of(run: Path, rank: int) -> Path:
    return run.with_name(f"{run.name}-rank-{rank}.log")


def durable(run: Path) -> int:
    """The newest step that any rank has known to be durable."""
    logs = [log_of(run, rank) for rank in range(8)]
    return max([0, *(int(line) for log in logs if log.exists() for line in log.read_text().split())])


def leftovers(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name.endswith((".partial", ".retired")))


def check_alone(run: Path, newest: int) -> int:
    """What one process finds of a disturbed training: all that was durable, bit by bit, and nothing else.

    The step it resumes from.
    """
    floor = durable(run)
    state = make_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is passed over
        with everystep.Checkpointer(run, state, mode="sync", keep=everystep.Keep(last=9)) as checkpointer:
            assert leftovers(run) == []
            resumed = checkpointer.restore()
            assert floor <= resumed <= newest
            assert bits(state) == bits(make_state(resumed))
            for step in checkpointer.steps:
                other = make_state()
                everystep.load(run / f"step-{step:012d}", other)
                assert bits(other) == bits(make_state(step))
            advance(state)
            checkpointer.save(resumed + 1)
    assert list_steps(str(run))[-1] == resumed + 1
    assert leftovers(run) == []
    return resumed


def error_of(function: Callable[[], Any]) -> tuple[str, str, tuple[int, ...]]:
    """The name of the type of what it raises, its text, and the ranks it names; empty when it does not."""
    try:
        function()
    except Exception as error:
        return kind_of(error), str(error), tuple(getattr(error, "ranks", ()))
    return "", "", ()
