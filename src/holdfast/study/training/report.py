"""The result of a training benchmark as tables for a terminal. Reads results, makes none."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.study.bars import MIB
from holdfast.study.report import NOTHING, TIMES, bars_table, plain_table
from holdfast.study.results import Spread
from holdfast.study.training.results import (
    HOLDFAST_COLD,
    NONE,
    OVERLAP,
    ArmRow,
    RecoveryRow,
    Restart,
    SweepPoint,
    TrainingResult,
    disturbance,
)


def to_json(result: TrainingResult) -> bytes:
    """The whole result, every sample included, as an indented JSON document."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def from_json(data: bytes) -> TrainingResult:
    return msgspec.json.decode(data, type=TrainingResult)


def render(result: TrainingResult) -> RenderableType:
    """The tables, the bars, and what a reader must know to read them."""
    parts: list[RenderableType] = [_heading(result), Text(), _steps(result), Text(), _phases(result)]
    if result.sweep:
        parts += [Text(), _sweep(result.sweep)]
    if result.recovery:
        parts += [Text(), _recovery(result.recovery)]
    parts += [Text(), bars_table("bars for training, overlap", result.bars), Text(), _footnotes(result)]
    return Group(*parts)


def _heading(result: TrainingResult) -> Text:
    model = result.model
    text = Text()
    text.append(f"GPT-2 of {model.layers} layers, width {model.width}", style="bold")
    text.append(
        f", {model.parameters / 1e6:.1f} M parameters, {model.batch} {TIMES} {model.sequence} tokens; "
    )
    text.append(f"{model.state_nbytes / 1e6:.0f} MB of state", style="bold")
    text.append(f" on {result.machine.filesystem}, {result.machine.cpu_count} CPUs; ")
    text.append(f"medians of {result.rounds} interleaved rounds of {result.steps} steps, ")
    text.append(f"{result.seconds / 60:.1f} minutes")
    return text


def _steps(result: TrainingResult) -> Table:
    table = plain_table("a training step, each with a durable checkpoint")
    _columns(table, "step s", "range", f"{TIMES}none", "stall", "CPU s", "crash loses", "MiB")
    for row in result.rows:
        table.add_row(row.title, *_step_cells(row), style=_style(row.arm, row.status))
    return table


def _step_cells(row: ArmRow) -> Sequence[str]:
    summary = row.summary
    if summary is None:
        return (NOTHING, row.status, *[NOTHING] * 5)
    steps = summary.step_seconds
    plain = row.arm == NONE
    return (
        f"{steps.median:.2f}",
        f"{steps.low:.2f}-{steps.high:.2f}",
        f"{summary.ratio:.3f}",
        NOTHING if plain else f"{100 * summary.stall_share.median:.1f} %",
        f"{summary.cpu_seconds.median:.2f}",
        "everything" if plain else _lost(summary.lost_typical, summary.lost_worst),
        NOTHING if plain or summary.extra_peak_nbytes is None else f"{summary.extra_peak_nbytes / MIB:,.0f}",
    )


def _lost(typical: float | None, worst: int | None) -> str:
    return NOTHING if typical is None else f"{typical:g}, worst {worst}"


def _phases(result: TrainingResult) -> Table:
    table = plain_table("where a step goes, medians in ms")
    _columns(table, "forward+backward", "waiting", "update", "save call")
    for row in result.rows:
        summary = row.summary
        if summary is not None:
            parts = (
                summary.compute_seconds,
                summary.wait_seconds,
                summary.update_seconds,
                summary.save_seconds,
            )
            table.add_row(row.title, *(_ms(part) for part in parts), style=_style(row.arm, row.status))
    return table


def _sweep(points: Sequence[SweepPoint]) -> Table:
    table = plain_table("overlap as the checkpoint outgrows forward+backward (ms)")
    _columns(table, "MB", "Tf+Tb", "ratio", "predicted", "raw B", "stall", "range", f"{TIMES}none")
    for point in points:
        stall = point.stall_seconds
        table.add_row(
            f"{point.batch} {TIMES} {point.sequence}",
            f"{point.state_nbytes / 1e6:,.0f}",
            _ms(point.compute_seconds),
            f"{point.pressure:.2f}",
            _ms(point.predicted_own_seconds),
            _ms(point.predicted_raw_seconds),
            _ms(stall.median),
            f"{_ms(stall.low)}-{_ms(stall.high)}",
            f"{point.ratio:.2f}",
        )
    return table


def _recovery(rows: Sequence[RecoveryRow]) -> Table:
    table = plain_table("killed: from the start of a new process to the end of its next step, in s")
    _columns(table, "total", "range", "imports", "model", "restore", "step", "lost")
    for row in rows:
        table.add_row(row.title, *_recovery_cells(row), style=_style(row.system, row.status))
    return table


def _recovery_cells(row: RecoveryRow) -> Sequence[str]:
    if not row.samples:
        return (NOTHING, row.status, *[NOTHING] * 5)

    def middle(part: Callable[[Restart], float]) -> str:
        return f"{statistics.median(part(sample) for sample in row.samples):.2f}"

    total = Spread.of([sample.seconds for sample in row.samples])
    return (
        f"{total.median:.2f}",
        f"{total.low:.2f}-{total.high:.2f}",
        middle(lambda sample: sample.import_seconds),
        middle(lambda sample: sample.build_seconds),
        middle(lambda sample: sample.restore_seconds),
        middle(lambda sample: sample.step_seconds),
        str(max(sample.lost for sample in row.samples)),
    )


def _footnotes(result: TrainingResult) -> Text:
    said: list[ArmRow | RecoveryRow] = [*result.rows, *result.recovery]
    notes = [
        *(f"{row.title}: {row.status}. {row.reason}" for row in said if row.reason),
        *result.problems,
        "'stall' is the share of a step in which the training thread waits, in the save call and before the "
        "update; 'CPU s' that of all threads per step; 'crash loses' completed steps not yet durable, when a "
        "save call has returned and at the worst moment seen; 'MiB' the peak of resident memory beyond that "
        "of training alone. Peers write over two names in turns, synced, without a rename.",
    ]
    if result.sweep:
        notes.append(
            "'ratio' is S/B to Tf+Tb: the time to write a checkpoint of S bytes, to that of forward and "
            "backward; predicted is max(0, S/B - (Tf+Tb)), with B of Holdfast's own save alone, or of a raw "
            "write. The stall can be less: what follows the last byte (sync, commit) is not waited for."
        )
    share = disturbance(result.row(NONE), result.machine.cpu_count)
    if share is not None:
        notes.insert(
            0, f"Others used {100 * share:.1f} % of the CPUs while training ran without checkpoints."
        )
    return Text("\n".join(notes), style="dim")


def _columns(table: Table, *names: str) -> None:
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, style="dim" if name == "range" else "")


def _style(key: str, status: str) -> str:
    if status != "measured":
        return "dim"
    return "bold green" if key in (OVERLAP, HOLDFAST_COLD) else ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.01 else f"{1000 * seconds:.1f}"
