"""The promises about training, held against one run: judged only at the size and pace they were made for."""

from __future__ import annotations

from holdfast.study.bars import make_bar
from holdfast.study.results import Bar
from holdfast.study.training.results import NONE, OVERLAP, TrainingResult, disturbance

STEP_TO_NONE = 1.05
STEP_GOAL = 1.03
STALL_PERCENT = 3.0

STATE_NBYTES = (300_000_000, 600_000_000)
STEP_SECONDS = (0.8, 2.5)
"""Made for steps of roughly one to two seconds."""
DISTURBED = 0.10
"""The share of the CPUs beyond which others make the comparison theirs: it then proves nothing."""


def judge(result: TrainingResult) -> tuple[Bar, ...]:
    row, plain = result.row(OVERLAP), result.row(NONE)
    ratio = stall = None
    detail = stall_detail = _out_of_range(result) or _disturbed(result)
    if row is None or row.summary is None:
        detail = stall_detail = "left out of this run" if row is None else f"{row.title}: {row.status}"
    elif plain is not None and not detail:
        ratio = row.summary.ratio
        stall = 100 * row.summary.stall_share.median
        rounds = row.summary.ratio_by_round
        detail = f"goal {STEP_GOAL:.2f}: {'reached' if ratio <= STEP_GOAL else 'not reached'}"
        detail += f"; by rounds {rounds.median:.2f} ({rounds.low:.2f} to {rounds.high:.2f})"
        worst = 100 * row.summary.stall_share.high
        stall_detail = f"worst step {worst:.1f} %"
    return (
        make_bar(
            "overlap-step",
            "step with a durable checkpoint each, against none",
            "<=",
            STEP_TO_NONE,
            ratio,
            "x",
            detail,
        ),
        make_bar(
            "overlap-stall",
            "share of a step in which training waits",
            "<=",
            STALL_PERCENT,
            stall,
            "%",
            stall_detail,
        ),
    )


def _disturbed(result: TrainingResult) -> str:
    shares = [disturbance(result.row(arm), result.machine.cpu_count) for arm in (NONE, OVERLAP)]
    worst = max((share for share in shares if share is not None), default=0.0)
    if worst <= DISTURBED:
        return ""
    return f"others used {100 * worst:.0f} % of the CPUs meanwhile; measure again when the machine is quiet"


def _out_of_range(result: TrainingResult) -> str:
    """Why the promises do not apply to this run; empty when they do."""
    row = result.row(NONE)
    if row is None or row.summary is None:
        return "training without checkpoints was not measured"
    low, high = STATE_NBYTES
    if not low <= result.model.state_nbytes <= high:
        found = f"{result.model.state_nbytes / 1e6:.0f} MB"
        return f"made for {low / 1e6:.0f} to {high / 1e6:.0f} MB of state, not {found}"
    shortest, longest = STEP_SECONDS
    seconds = row.summary.step_seconds.median
    if not shortest <= seconds <= longest:
        return f"made for steps of {shortest} to {longest} s, not {seconds:.2f}"
    return ""
