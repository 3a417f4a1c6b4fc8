"""The study's report as one HTML page that needs no network, and as Markdown."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from everystep_study.campaign import SUITES
from everystep_study.report_parts import (
    Bar,
    Cell,
    Chart,
    Number,
    Part,
    Section,
    Source,
    Strip,
    Table,
    Words,
    name_of,
)
from everystep_study.results_directory import FILE, Entry, ResultsDirectory
from everystep_study.suites.cost import SLOW_TURN_SECONDS
from everystep_study.views import markdown_table

_STYLE = Path(__file__).with_name("report.css")
_ORDER = ("cost", "formats", "scale", "determinism", "bitflips")
_ROW, _TEXT, _BAR = 36, 13, 12
_LONG = 30
"""Words in a cell that are longer may be broken into lines."""
_ROOM = 1.3
"""One bad round must not make all bars short: whiskers end at this multiple of the longest bar."""


def write(found: ResultsDirectory, folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    page, summary = folder / "report.html", folder / "report.md"
    page.write_text(html(found), "utf-8")
    summary.write_text(markdown(found), "utf-8")
    return page, summary


def html(found: ResultsDirectory) -> str:
    made = sections(found)
    links = "".join(f'<a href="#{section.key}">{escape(section.title)}</a> ' for section in made)
    body = [
        f"<h1>{_TITLE}</h1>",
        *(f"<p>{escape(line)}</p>" for line in _introduction(found)),
        f"<nav>{links}</nav>",
        *(_section(section) for section in made),
        f'<p class="quiet">{escape(_METHOD)} Raw results: <code>{FILE}</code>. Point at a number to see '
        "where it "
        "comes from.</p>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_TITLE}</title><style>{_STYLE.read_text()}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def markdown(found: ResultsDirectory) -> str:
    lines = [f"# {_TITLE}", ""]
    lines += [line for text in _introduction(found) for line in (text, "")]
    for section in sections(found):
        lines += [f"## {section.title}", ""]
        lines += [line for text in section.prose for line in (text, "")]
        for part in section.parts:
            lines += [f"### {part.title}", ""]
            for item in part.items:
                if isinstance(item, Table):
                    lines += [_markdown_table(item), ""]
        if section.notes:
            lines += ["Not measured:", "", *(f"- {note}" for note in section.notes), ""]
    return "\n".join([*lines, _METHOD]) + "\n"


def sections(found: ResultsDirectory) -> list[Section]:
    """Those suites that were measured."""
    made = []
    for key in _ORDER:
        entries = [entry for entry in found.entries if entry.part.suite == key]
        if not entries:
            continue
        report = SUITES[key].report
        parts = [Part(name_of(entry), tuple(report.items(Source(entry)))) for entry in entries]
        if overview := report.overview(entries):
            parts.insert(0, Part("At a glance", (overview,)))
        made.append(Section(key, report.title, report.prose, parts, _not_measured(entries)))
    return made


def _not_measured(entries: Sequence[Entry]) -> list[str]:
    """What was not measured, and why."""
    found: dict[str, None] = {}
    for entry in entries:
        for row in entry.result.rows:
            if row.status != "measured":
                found[f"{name_of(entry)}: {row.title}: {row.status}. {row.reason}"] = None
        for problem in entry.result.problems:
            found[f"{name_of(entry)}: {problem}"] = None
    return list(found)


_TITLE = "What checkpoints cost: a study"
_METHOD = (
    "All mechanisms of one framework and model take turns in every round; frameworks follow one another. A "
    "first round warms up and is thrown away; but a turn of the costs that takes longer than "
    f"{SLOW_TURN_SECONDS:.0f} seconds counts from the first on, because it saves before its clock starts, "
    "too. Numbers are medians, with the lowest and the highest in parentheses; a difference within these is "
    "noise. Numbers without parentheses were measured once."
)


def _introduction(found: ResultsDirectory) -> list[str]:
    header, machine = found.header, found.header.machine
    when = time.strftime("%Y-%m-%d", time.gmtime(header.created))
    versions: dict[str, str] = {"Everystep": header.everystep, "Python": machine.versions.get("python", "")}
    for entry in found.entries:
        versions.update(entry.versions)
    kind = (
        "A quick study, with small models and few rounds: for a first look."
        if header.quick
        else "A full study."
    )
    rounds = {
        len(row.values(name)) for entry in found.entries for row in entry.result.rows for name in _TIMED
    }
    counts = sorted(rounds - {0})
    said = [
        f"{kind} Measured on {when}, with seed {header.seed}, on {machine.cpu_count} CPUs, "
        f"{machine.filesystem}, {machine.platform}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.",
    ]
    if counts:
        shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        said.append(f"Counted rounds: {shown}.")
    shares = [entry.result.machine.others_share for entry in found.entries]
    busy = [share for share in shares if share is not None and share > _BUSY]
    loads = [entry.result.machine.load_before for entry in found.entries]
    if busy or (loads and max(loads) > machine.cpu_count):
        said.append("Other programs kept the machine busy during a part of it: read differences with care.")
    missing = sorted({name_of(entry) for entry in found.entries if entry.missing})
    if missing:
        said.append(f"Not installed, so not measured: {'; '.join(missing)}.")
    return said


_TIMED = ("seconds",)
_BUSY = 0.25


def _section(section: Section) -> str:
    lines = [f'<section><h2 id="{section.key}">{escape(section.title)}</h2>']
    lines += [f"<p>{escape(text)}</p>" for text in section.prose]
    for part in section.parts:
        if part.items:
            lines.append(f"<h3>{escape(part.title)}</h3>")
        lines += [_item(item) for item in part.items]
    if section.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
        lines.append(f'<p>Not measured:</p><ul class="quiet">{items}</ul>')
    return "\n".join([*lines, "</section>"])


def _item(item: Table | Chart | Strip) -> str:
    if isinstance(item, Table):
        return _table(item)
    return _chart(item) if isinstance(item, Chart) else _strip(item)


def _strip(strip: Strip) -> str:
    lines = []
    for index, (label, squares, ours) in enumerate(strip.rows):
        top = index * _ROW
        kind = ' class="ours"' if ours else ""
        lines.append(f'<text{kind} x="0" y="{top + _TEXT}">{escape(label)}</text>')
        width = 100 / max(1, len(squares))
        for place, (tone, number) in enumerate(squares):
            source = "" if number is None else f"{_attributes(number, 'data-value')} "
            lines.append(
                f'<rect {source}class="square {tone}" x="{place * width:.3f}%" y="{top + _TEXT + 5}" '
                f'width="{0.85 * width:.3f}%" height="{_BAR}"/>'
            )
    foot = len(strip.rows) * _ROW + _TEXT
    for place, words in enumerate(strip.below):
        anchor = "start" if not place else "end"
        at = 100 * place / max(1, len(strip.below) - 1)
        lines.append(
            f'<text class="foot" x="{at:.0f}%" y="{foot}" text-anchor="{anchor}">{escape(words)}</text>'
        )
    keys = "".join(f'<span class="key {tone}"></span>{escape(words)}' for tone, words in strip.legend)
    return (
        f'<figure><figcaption>{escape(strip.title)}</figcaption><div class="quiet">{keys}</div>'
        f'<svg height="{foot + 6}" role="img" aria-label="{escape(strip.title, quote=True)}">'
        f"{''.join(lines)}</svg></figure>"
    )


def _attributes(number: Number, value: str) -> str:
    source = escape(number.source, quote=True)
    return f'{value}="{number.value!r}" data-source="{source}"'


def _table(table: Table) -> str:
    heads = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = []
    for name, cells, ours in table.rows:
        kind = ' class="ours"' if ours else ""
        rows.append(f"<tr{kind}><th>{escape(name)}</th>{''.join(map(_column, cells))}</tr>")
    return (
        f'<p class="title">{escape(table.title)}</p><div class="wide"><table>'
        f"<thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _column(cell: Cell) -> str:
    long = isinstance(cell, Words) and len(cell.text) > _LONG
    return f'<td class="words">{_cell(cell)}</td>' if long else f"<td>{_cell(cell)}</td>"


def _cell(cell: Cell) -> str:
    parts = cell if isinstance(cell, tuple) else (cell,)
    tone = next((part.tone for part in parts if isinstance(part, Words) and part.tone), "")
    shown = [_word(part) for part in parts]
    text = shown[0] + (f'<span class="range">{"".join(shown[1:])}</span>' if len(shown) > 1 else "")
    return f'<span class="{tone}">{text}</span>' if tone else text


def _word(part: Number | Words, tag: str = "data") -> str:
    if isinstance(part, Words):
        return escape(part.text)
    source = _attributes(part, "value" if tag == "data" else "data-value")
    hint = f' title="{escape(part.source, quote=True)}"' if tag == "data" else ""
    return f"<{tag} {source}{hint}>{escape(part.text)}</{tag}>"


def _chart(chart: Chart) -> str:
    totals = [sum(part.value for part in bar.parts if part is not None) for bar in chart.bars]
    longest = max([*totals, 1e-12])
    whiskers = [bar.high.value for bar in chart.bars if bar.high is not None]
    scale = 100 / max(longest, min(max(whiskers, default=0.0), _ROOM * longest))
    drawn = "".join(_bar(bar, index * _ROW, scale, len(chart.legend)) for index, bar in enumerate(chart.bars))
    keys = "".join(f'<span class="key p{i}"></span>{escape(name)}' for i, name in enumerate(chart.legend))
    legend = f'<div class="quiet">{keys}</div>' if keys else ""
    return (
        f"<figure><figcaption>{escape(chart.title)}, {chart.unit}</figcaption>{legend}"
        f'<svg height="{_ROW * len(chart.bars)}" role="img" '
        f'aria-label="{escape(chart.title, quote=True)}">{drawn}'
        "</svg></figure>"
    )


def _bar(bar: Bar, top: int, scale: float, parts: int) -> str:
    """A line with the name on the left and the numbers on the right, and the bar below it."""
    kind = ' class="ours"' if bar.ours else ""
    numbers = [_word(part, "tspan") for part in bar.parts if part is not None]
    shown = " + ".join(numbers) if numbers else "not measured"
    lines = [
        f'<text{kind} x="0" y="{top + _TEXT}">{escape(bar.label)}</text>',
        f'<text x="100%" y="{top + _TEXT}" text-anchor="end">{shown}</text>',
    ]
    left = 0.0
    for index, part in enumerate(bar.parts):
        if part is None:
            continue
        width = max(0.0, part.value * scale)
        fill = f"p{index}" if parts else "ours" if bar.ours else "peer"
        lines.append(
            f'<rect class="{fill}" x="{left:.3f}%" y="{top + _TEXT + 5}" width="{width:.3f}%" '
            f'height="{_BAR}"/>'
        )
        left += width
    if bar.low is not None and bar.high is not None:
        y = top + _TEXT + 5 + _BAR // 2
        low, high = (max(0.0, min(100.0, number.value * scale)) for number in (bar.low, bar.high))
        lines.append(f'<line x1="{low:.3f}%" x2="{high:.3f}%" y1="{y}" y2="{y}"/>')
    return "".join(lines)


def _markdown_table(table: Table) -> str:
    def cells(row: tuple[str, tuple[Cell, ...], bool]) -> list[str]:
        name, found, ours = row
        parts = (cell if isinstance(cell, tuple) else (cell,) for cell in found)
        return [f"**{name}**" if ours else name, *("".join(part.text for part in cell) for cell in parts)]

    return markdown_table(table.title, table.headings, map(cells, table.rows))
