"""The result of a benchmark of several ranks as tables for a terminal. Reads results, makes none."""

from __future__ import annotations

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.study import results
from holdfast.study.ranks.results import RanksResult, Row
from holdfast.study.report import BUSY, NOTHING, TIMES, bars_table, plain_table, size

_OURS = (results.HOLDFAST, results.RECYCLED)


def to_json(result: RanksResult) -> bytes:
    """The whole result as an indented JSON document."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def from_json(data: bytes) -> RanksResult:
    return msgspec.json.decode(data, type=RanksResult)


def render(result: RanksResult) -> RenderableType:
    """The tables, the bars, and what a reader must know to read them."""
    parts: list[RenderableType] = [_heading(result), Text(), _saves(result)]
    if result.of("writers"):
        parts += [Text(), _writers(result), _best(result)]
    if result.of("load"):
        parts += [Text(), _loads(result)]
    return Group(*parts, Text(), bars_table("bars for ranks", result.bars), Text(), _footnotes(result))


def _heading(result: RanksResult) -> Text:
    text = Text()
    text.append(f"{size(result.state_nbytes)} in {result.state_leaves:,} tensors on every rank", style="bold")
    text.append(f" (gpt2 with Adam, data parallel) on {result.machine.filesystem}, ")
    text.append(f"{result.machine.cpu_count} CPUs; medians of {result.rounds} interleaved rounds, ")
    text.append(f"{result.seconds / 60:.1f} minutes")
    return text


def _saves(result: RanksResult) -> Table:
    table = plain_table("durable save, all ranks together")
    _columns(table, "ranks", "GB/s", "range", "of raw", f"{TIMES}Holdfast", "shares", "copies")
    for row in result.of("save"):
        table.add_row(
            row.title, str(row.world), *_speed_cells(row), *_written_cells(row, result), style=_style(row)
        )
    return table


def _writers(result: RanksResult) -> Table:
    table = plain_table("Checkpointer, by the number of ranks that write")
    _columns(table, "GB/s", "range", "of raw")
    for row in result.of("writers"):
        best = "bold green" if row.writers == result.best_writers else _style(row)
        table.add_row(row.title, *_speed_cells(row)[:3], style=best)
    return table


def _best(result: RanksResult) -> Text:
    best = result.best_writers
    if best is None:
        return Text("which number of writers is best was not measured", style="yellow")
    text = Text(f"best on this device: {best} {'writer' if best == 1 else 'writers'}", style="bold")
    equal = [str(writers) for writers in result.about_as_good if writers != best]
    if equal:
        text.append(f" (about as good: {', '.join(equal)})", style="not bold")
    return text


def _loads(result: RanksResult) -> Table:
    warm = result.temperature == "warm"
    how = "warm page cache" if warm else f"cold page cache ({result.cache_method})"
    table = plain_table(f"load into every rank, {how}")
    _columns(table, "ranks", "GB/s", "range", "of raw", f"{TIMES}Holdfast")
    for row in result.of("load"):
        title = row.title.removesuffix(" + fsync").replace(".save", ".load")
        worlds = f"{row.saved_by} \N{RIGHTWARDS ARROW} {row.world}"
        table.add_row(title, worlds, *_speed_cells(row), style=_style(row))
    return table


def _speed_cells(row: Row) -> tuple[str, ...]:
    if row.summary is None:
        # Why is said below the tables: a reason can be long.
        return NOTHING, row.status, NOTHING, NOTHING
    speed = row.summary.gb_per_second
    faster = None if row.system in _OURS else row.summary.holdfast_is_faster_by
    return (
        f"{speed.median:.2f}",
        f"{speed.low:.2f}-{speed.high:.2f}",
        _number(row.summary.of_raw),
        _number(faster),
    )


def _written_cells(row: Row, result: RanksResult) -> tuple[str, str]:
    if row.written is None or row.system == results.RAW:
        return NOTHING, NOTHING
    writing = sum(1 for nbytes in row.written.per_rank if nbytes)
    shares = f"{100 * row.written.spread:.2f} %" if writing == row.world else f"{writing} of {row.world}"
    return shares, f"{row.written.stored_nbytes / result.state_nbytes:.3f}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _footnotes(result: RanksResult) -> Text:
    notes = [
        *(f"{row.title}, {row.world} ranks: {row.status}. {row.reason}" for row in result.rows if row.reason),
        *result.problems,
        "GB/s: bytes of one copy of the state (GB is 10^9), over the time from the first rank's start to "
        "the last one's end; of a load, too, however many ranks receive it. Every save is synced, files and "
        f"directories. 'of raw': of one process writing (reading) as much; '{TIMES}Holdfast': how many "
        "times as fast as that row holdfast.save (holdfast.load) is; 'shares': how far apart the bytes of "
        "the ranks are, of a share, or how many of them wrote any; 'copies': what is on the disk, over the "
        "state. Checkpointer is the steady state of a training, over recycled files; holdfast.save makes a "
        "new directory, and meets, plans and compares replicas each time. The raw limit is that of one "
        "process, memory in normal pages and a new file: several writers, huge pages, and writing over an "
        "old file can be faster.",
    ]
    if result.machine.load_before > BUSY * result.machine.cpu_count:
        notes.insert(
            0,
            f"Others kept {result.machine.load_before:.1f} of {result.machine.cpu_count} CPUs busy before "
            "this run began: take these numbers with care, or again when the machine is quiet.",
        )
    if max(result.ranks) > result.machine.cpu_count:
        notes.append(
            f"{max(result.ranks)} ranks share {result.machine.cpu_count} CPUs here; on a node of its own "
            "a rank has more."
        )
    return Text("\n".join(notes), style="dim")


def _columns(table: Table, *names: str) -> None:
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, style="dim" if name == "range" else "")


def _style(row: Row) -> str:
    if row.status != "measured":
        return "dim"
    return "bold green" if row.system in _OURS else ""
