"""What all commands share: two consoles, ``--json``, progress bars, and the end of a command.

Results go to standard output, everything else to standard error. With ``--json`` standard output holds one
JSON document and nothing else, even if something fails. A command runs inside `session` and ends with
`Session.finish`. An error that a user can cause is printed as its `ErrorReport`, never as a traceback.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from everystep.cli.errors import BROKEN_PIPE, INTERRUPTED, PROBLEM, ErrorReport, report_of
from everystep.cli.words import plain
from everystep.errors import EverystepError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column, Table

_UNBOUNDED_COLUMNS = 10_000
"""Width of output that is not a terminal: programs that read lines want them whole."""

_USUAL_COLUMNS = 80
_MIN_COLUMNS = 40
"""A narrower terminal would only fit single letters."""
_MIN_FOLDED = 10
"""A column that folds keeps this much."""
_BETWEEN = 2
_INDENT = "  "
_NO_BREAK = "\N{NO-BREAK SPACE}"
_ENDS_OF_PARTS = (
    re.compile(r"\s{2,}"),
    re.compile(r"(?<!\d)\.|\.(?!\d)|/|\s+"),
    re.compile(r"[_,=:]|(?<!\de)-"),
)
"""Where a long text is cut: after the first of these that is in it. A number is not cut."""
_UNIT = re.compile(r"(?<=\d) (?=[^\W\d]{1,3}(?:/s)?(?!\w))")
"""Between a number and its unit no line ends."""
_PAIR = re.compile(r"(?:^|(?<=  ))\S+ \S+(?=  |$)")
_MAX_PAIR = 24
"""The name and value of a metric stay on one line up to this width."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
MaxInflation = Annotated[
    float,
    typer.Option(
        "--max-inflation",
        min=1,
        metavar="TIMES",
        help="Of another system's file, which may be compressed: how many times its size may come out of it. "
        "Up to 256 MiB always may; inf allows any.",
    ),
]
Progress = Callable[[int, int], None]


class Session:
    """One command at work."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = _console(stderr=False)
        self.errors = _console(stderr=True)

    def emit(self, document: object) -> None:
        """Prints a result (dataclasses and plain data) as the one JSON document."""
        import json

        import msgspec

        plain = _finite(msgspec.to_builtins(document))
        # ASCII only: paths need not be valid UTF-8, nor the terminal's encoding be UTF-8.
        print(json.dumps(plain, indent=2, allow_nan=False))

    def say(self, text: str, style: str = "") -> None:
        _say(self.console, text, style)

    def tabulate(self, rows: Table, *, spare: str | None = None) -> None:
        """Prints a table. Where the terminal is narrow, without the `spare` column, then in several tables.

        Each of these has the first column. Names and texts are folded. Numbers are not: a number that is
        cut is another number.
        """
        least = [_least_width(column) for column in rows.columns]
        shown = list(range(len(least)))
        if sum(least) > self.console.width + _BETWEEN:
            shown = [at for at in shown if rows.columns[at].header != spare]
        for number, part in enumerate(_parts(shown, least, self.console.width + _BETWEEN)):
            if number:
                self.console.print()
            self._tabulate(rows if len(part) == len(least) else _with_columns(rows, part))

    def _tabulate(self, rows: Table) -> None:
        columns = [(_whole_width(column), column) for column in rows.columns]
        fixed = sum(_BETWEEN + (width if column.no_wrap else 0) for width, column in columns) - _BETWEEN
        folding = sorted((width, at) for at, (width, column) in enumerate(columns) if not column.no_wrap)
        smallest = {at: _smallest(rows.columns[at]._cells) for _, at in folding}
        least = fixed + sum(min(width, smallest[at]) for width, at in folding)
        console = self.console if self.console.width >= least else _console(stderr=False, width=least)
        left = console.width - fixed
        # The narrow ones first: the others share the rest.
        for place, (width, at) in enumerate(folding):
            share = max(left // (len(folding) - place), smallest[at])
            if width > share:
                cells = rows.columns[at]._cells
                cells[:] = [folded(str(text), share) for text in cells]
            left -= min(width, share)
        self.show(rows, console)

    def show(self, content: RenderableType, console: Console | None = None) -> None:
        """Prints a table; for other programs, without the spaces that fill its lines."""
        console = console or self.console
        if console.is_terminal:
            console.print(content)
            return
        with console.capture() as captured:
            console.print(content)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()), file=console.file)

    def fail(self, kind: str, message: str) -> NoReturn:
        """Ends the command with an error other than an `EverystepError`."""
        self.end(ErrorReport(kind, message))

    def end(self, report: ErrorReport) -> NoReturn:
        """Ends the command with an error: one line, or one document."""
        if self.as_json:
            self.emit({"error": {"type": report.type, "message": report.message, **report.details}})
            sys.stdout.flush()
        else:
            lines = "\n".join(plain(line) for line in report.message.splitlines())
            _say(self.errors, f"everystep: {lines}", "red")
        raise typer.Exit(report.exit_code)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """A bar over bytes on a terminal. Yields the function that takes the bytes done, and those in all."""
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(binary_units=True),
            SpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=self.errors,
            transient=True,
        )
        with bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def finish(self, *, problem: bool) -> None:
        """The last call of a command."""
        sys.stdout.flush()
        if problem:
            raise typer.Exit(PROBLEM)


@contextmanager
def session(as_json: bool) -> Iterator[Session]:
    """Runs a command: errors become one clear line (or one JSON document) and an exit code."""
    begun = Session(as_json)
    try:
        yield begun
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        close_output()
        raise typer.Exit(BROKEN_PIPE) from None
    except (EverystepError, OSError) as error:
        begun.end(report_of(error))


def table(*columns: str, right: tuple[str, ...] = (), fold: tuple[str, ...] = ()) -> Table:
    """A table without lines between columns. Those in `fold` wrap when the terminal is narrow."""
    from rich import box
    from rich.table import Table

    made = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for name in columns:
        made.add_column(
            name, justify="right" if name in right else "left", no_wrap=name not in fold, overflow="fold"
        )
    return made


def _whole_width(column: Column) -> int:
    from rich.cells import cell_len

    return max(cell_len(str(text)) for text in (column.header, *column.cells))


def _least_width(column: Column) -> int:
    """What a column needs, with the space to the next one."""
    width = _whole_width(column)
    return _BETWEEN + (width if column.no_wrap else min(width, _smallest(column._cells)))


def _parts(shown: list[int], least: list[int], width: int) -> Iterator[list[int]]:
    """The columns, in as many tables as they need. All have the first column."""
    first, *others = shown
    part = [first]
    for at in others:
        if len(part) > 1 and sum(least[other] for other in (*part, at)) > width:
            yield part
            part = [first]
        part.append(at)
    yield part


def _with_columns(rows: Table, chosen: list[int]) -> Table:
    columns = [rows.columns[at] for at in chosen]
    made = table()
    for column in columns:
        made.add_column(
            column.header,
            justify=column.justify,
            style=column.style,
            no_wrap=column.no_wrap,
            overflow=column.overflow,
        )
    for row, *cells in zip(rows.rows, *(column._cells for column in columns), strict=True):
        made.add_row(*cells, style=row.style)
    return made


def _smallest(cells: Iterable[object]) -> int:
    """How narrow a column that folds may become: a metric keeps its value beside its name."""
    pairs = (
        len(_INDENT) * (found.start() > 0) + len(found[0])
        for cell in cells
        for found in _PAIR.finditer(str(cell))
    )
    return max((width for width in pairs if _MIN_FOLDED < width <= _MAX_PAIR), default=_MIN_FOLDED)


def folded(text: str, width: int) -> str:
    """A long name on several lines, cut where its parts end if possible. Later lines are indented."""
    lines: list[str] = []
    indent = ""
    while len(indent) + len(text) > width:
        space = width - len(indent)
        ends = (_ends(marks, text, space) for marks in _ENDS_OF_PARTS)
        at = next((found[-1] for found in ends if found and found[-1] >= space // 3), space)
        lines.append(indent + text[:at].rstrip())
        text, indent = text[at:].lstrip(), _INDENT
    return "\n".join([*lines, indent + text] if text else lines)


def _ends(marks: re.Pattern[str], text: str, space: int) -> list[int]:
    """Where `text` can be cut so that the part before fits `space`. Spaces at its end need none."""
    found = (match.end() for match in marks.finditer(text, 0, space + len(_INDENT)))
    return [end for end in found if len(text[:end].rstrip()) <= space]


def _say(console: Console, text: str, style: str) -> None:
    """Prints sentences, in lines that fit. A path longer than a line is not cut: it may be copied."""
    lines = [part for line in text.split("\n") for part in _wrapped(line, console.width)]
    console.print("\n".join(lines), style=style or None, soft_wrap=True)


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + _INDENT
    made = textwrap.wrap(
        _UNIT.sub(_NO_BREAK, line),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace(_NO_BREAK, " ") for part in made]


def facts(rows: list[tuple[str, str]]) -> Table:
    """Names and their values, one per line, without a heading."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def _console(*, stderr: bool, width: int | None = None) -> Console:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the process here, with a code of its own; `session` knows what to do

    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = _UNBOUNDED_COLUMNS
    # Names from files are text, not markup.
    made = Quiet(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)
    if made.width < _MIN_COLUMNS:
        made.width = _MIN_COLUMNS if made.width else _USUAL_COLUMNS
    return made


def _finite(value: Any) -> Any:
    """JSON has no infinities and no NaN; they are written as text, as in manifests."""
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def close_output() -> None:
    # The reader is gone. Buffered output must not fail again when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
