"""Whether a call of `save` saves, and whether the process ends after it: the same on all ranks.

The schedule says when to save. A signal that asks the process to end (`preemption`) makes the next call save
whatever the schedule says, and ends the process then. With several ranks the coordinator decides for all.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from everystep.checkpointer.preemption import Preemption
from everystep.checkpointer.schedule import Schedule
from everystep.store import RankGroup, SaveRound


@dataclass(frozen=True, slots=True)
class Decision:
    """`due`: save now. `signal`: end the process then. `save_round`: the ranks' messages about this save."""

    due: bool
    signal: str | None
    save_round: SaveRound | None


class PreemptionDuty:
    """Of one Checkpointer. Without `listens`, signals are left alone."""

    def __init__(self, group: RankGroup, schedule: Schedule, exit_code: int, *, listens: bool) -> None:
        self._group = group
        self._schedule = schedule
        self._exit_code = exit_code
        self._preemption = Preemption(exit_code) if listens else None

    @property
    def received(self) -> str | None:
        """The name of the signal that asked this process to end, if one did."""
        return None if self._preemption is None else self._preemption.received

    def decide(self, step: int, now: float) -> Decision:
        """What this call of `save` does."""
        group, signal = self._group, self.received
        if group.transport is None:
            return Decision(signal is not None or self._schedule.due(step, now), signal, None)
        if group.is_coordinator:
            signal = signal or group.signalled()
        elif signal is not None:
            group.signal(signal)
        due = group.is_coordinator and (signal is not None or self._schedule.due(step, now))
        save_round = group.begin("the Checkpointer's save", step, due=due, signal=signal)
        assert save_round is not None
        return Decision(save_round.call.due, save_round.call.signal, save_round)

    def fulfilled(self, run: str, step: int, signal: str) -> int | None:
        """That step is durable. Returns the exit code to end with; None: other Checkpointers save first."""
        code: int | None = self._exit_code
        if self._preemption is not None:
            # Several ranks end at the same step, whatever other Checkpointers one of them has.
            code = self._preemption.obeyed(at_once=self._group.transport is not None)
        if self._group.is_coordinator:
            _print_preempted(run, step, signal, code)
        return code

    def close(self) -> None:
        """Signals do again what they would do without Everystep."""
        if self._preemption is not None:
            self._preemption.close()


def checked_exit_code(code: object) -> int:
    if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= 255:
        raise ValueError(f"preemption_exit_code must be an int from 0 to 255, not {code!r}")
    return code


def _print_preempted(run: str, step: int, signal: str, code: int | None) -> None:
    """For people: otherwise they would wonder why the process ended without an error."""
    then = (
        "the process ends when its other Checkpointers have saved"
        if code is None
        else f"the process ends with exit code {code}. Start the same command again to go on from there"
    )
    print(
        f"everystep: {signal} received: step {step} is saved in {run}; {then}.", file=sys.stderr, flush=True
    )
