"""Writes a page of `report` as Markdown, as HTML that needs no network, or as the tables of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import rich.table
from rich import box
from rich.text import Text

from everystep_study.report.elements import Bar, Cell, Chart, Number, Page, Section, Strip, Table, Words

_STYLE = Path(__file__).with_name("report.css")
_ROW, _TEXT, _BAR = 36, 13, 12
_LONG = 30
"""Words in a cell that are longer may be broken into lines."""
_ROOM = 1.3
"""One bad round must not make all bars short: whiskers end at this multiple of the longest bar."""
_STYLES = {"good": "green", "bad": "bold red", "unsure": "yellow", "": ""}


def terminal(table: Table) -> rich.table.Table:
    """Without vertical lines, so that all columns fit in a width of 80 or a little more."""
    made = rich.table.Table(
        title=table.title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    made.add_column("", no_wrap=not any("\n" in name for name, _, _ in table.rows))
    for name in table.headings:
        made.add_column(name, justify="right", no_wrap=True, style="dim" if name == "range" else "")
    for name, cells, ours in table.rows:
        shown = [Text(_plain(cell), style=_STYLES[_tone(cell)]) for cell in cells]
        made.add_row(name, *shown, style="bold green" if ours else "")
    return made


def markdown(page: Page) -> str:
    """Tables only: charts show the same numbers."""
    lines = [f"# {page.title}", "", *_paragraphs(page.introduction)]
    for section in page.sections:
        lines += [f"## {section.title}", "", *_paragraphs(section.prose)]
        for title, items in section.parts:
            lines += [f"### {title}", ""] if title else []
            for table in items:
                if isinstance(table, Table):
                    lines += [*_markdown_table(table), ""]
        if section.not_measured:
            lines += ["Not measured:", "", *(f"- {note}" for note in section.not_measured), ""]
        lines += _paragraphs(section.remarks)
    return "\n".join([*lines, page.end]).rstrip() + "\n"


def _paragraphs(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from (text, "")


def _markdown_table(table: Table) -> Iterator[str]:
    yield from (f"**{table.title}**", "", f"| | {' | '.join(table.headings)} |")
    yield f"|---|{'---:|' * len(table.headings)}"
    for name, cells, ours in table.rows:
        yield f"| {' | '.join([_bold(name, ours), *map(_plain, cells)])} |"


def _bold(name: str, ours: bool) -> str:
    plain = name.replace("\n", ": ")
    return f"**{plain}**" if ours else plain


def _words(cell: Cell) -> tuple[Number | Words, ...]:
    return cell if isinstance(cell, tuple) else (cell,)


def _plain(cell: Cell) -> str:
    return "".join(part.text for part in _words(cell))


def _tone(cell: Cell) -> str:
    return next((part.tone for part in _words(cell) if isinstance(part, Words) and part.tone), "")


def html(page: Page) -> str:
    links = "".join(f'<a href="#{each.key}">{escape(each.title)}</a> ' for each in page.sections)
    body = [
        f"<h1>{escape(page.title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in page.introduction),
        f"<nav>{links}</nav>",
        *map(_section, page.sections),
        f'<p class="quiet">{escape(page.end)} Point at a number to see where it comes from.</p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{_STYLE.read_text()}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(section: Section) -> str:
    lines = [f'<section><h2 id="{section.key}">{escape(section.title)}</h2>']
    lines += [f"<p>{escape(text)}</p>" for text in section.prose]
    for title, items in section.parts:
        lines += [f"<h3>{escape(title)}</h3>"] if title and items else []
        for item in items:
            match item:
                case Table():
                    lines.append(_table(item))
                case Chart():
                    lines.append(_chart(item))
                case Strip():
                    lines.append(_strip(item))
    if section.not_measured:
        items_ = "".join(f"<li>{escape(note)}</li>" for note in section.not_measured)
        lines.append(f'<p>Not measured:</p><ul class="quiet">{items_}</ul>')
    lines += [f'<p class="quiet">{escape(text)}</p>' for text in section.remarks]
    return "\n".join([*lines, "</section>"])


def _table(table: Table) -> str:
    heads = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = [
        f"<tr{_ours(ours)}><th>{escape(name)}</th>{''.join(map(_column, cells))}</tr>"
        for name, cells, ours in table.rows
    ]
    return (
        f'<p class="title">{escape(table.title)}</p><div class="wide"><table>'
        f"<thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _column(cell: Cell) -> str:
    long = isinstance(cell, Words) and len(cell.text) > _LONG
    shown = [_word(part) for part in _words(cell)]
    text = shown[0] + (f'<span class="range">{"".join(shown[1:])}</span>' if len(shown) > 1 else "")
    if tone := _tone(cell):
        text = f'<span class="{tone}">{text}</span>'
    return f'<td class="words">{text}</td>' if long else f"<td>{text}</td>"


def _ours(ours: bool) -> str:
    return ' class="ours"' if ours else ""


def _word(part: Number | Words, tag: str = "data") -> str:
    if isinstance(part, Words):
        return escape(part.text)
    hint = f' title="{escape(part.source, quote=True)}"' if tag == "data" else ""
    source = _source(part, "value" if tag == "data" else "data-value")
    return f"<{tag} {source}{hint}>{escape(part.text)}</{tag}>"


def _source(number: Number, value: str = "data-value") -> str:
    return f'{value}="{number.value!r}" data-source="{escape(number.source, quote=True)}"'


def _figure(
    item: Chart | Strip, title: str, height: int, legend: Sequence[tuple[str, str]], drawn: str
) -> str:
    keys = "".join(f'<span class="key {tone}"></span>{escape(words)}' for tone, words in legend)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        + (f'<div class="quiet">{keys}</div>' if keys else "")
        + f'<svg height="{height}" role="img" aria-label="{escape(item.title, quote=True)}">{drawn}</svg>'
        "</figure>"
    )


def _strip(strip: Strip) -> str:
    lines = []
    for index, (label, squares, ours) in enumerate(strip.rows):
        top = index * _ROW
        lines.append(f'<text{_ours(ours)} x="0" y="{top + _TEXT}">{escape(label)}</text>')
        width = 100 / max(1, len(squares))
        for place, (tone, number) in enumerate(squares):
            source = "" if number is None else f"{_source(number)} "
            lines.append(
                f'<rect {source}class="square {tone}" x="{place * width:.3f}%" y="{top + _TEXT + 5}" '
                f'width="{0.85 * width:.3f}%" height="{_BAR}"/>'
            )
    foot = len(strip.rows) * _ROW + _TEXT
    for place, words in enumerate(strip.below):
        at, anchor = 100 * place / max(1, len(strip.below) - 1), "end" if place else "start"
        lines.append(
            f'<text class="foot" x="{at:.0f}%" y="{foot}" text-anchor="{anchor}">{escape(words)}</text>'
        )
    return _figure(strip, strip.title, foot + 6, strip.legend, "".join(lines))


def _chart(chart: Chart) -> str:
    totals = [sum(part.value for part in bar.parts if part is not None) for bar in chart.bars]
    longest = max([*totals, 1e-12])
    whiskers = [bar.high.value for bar in chart.bars if bar.high is not None]
    scale = 100 / max(longest, min(max(whiskers, default=0.0), _ROOM * longest))
    legend = [(f"p{index}", name) for index, name in enumerate(chart.legend)]
    drawn = "".join(_bar(bar, index * _ROW, scale, bool(legend)) for index, bar in enumerate(chart.bars))
    return _figure(chart, f"{chart.title}, {chart.unit}", _ROW * len(chart.bars), legend, drawn)


def _bar(bar: Bar, top: int, scale: float, in_parts: bool) -> str:
    """A line with the name on the left and the numbers on the right, and the bar below it."""
    numbers = [_word(part, "tspan") for part in bar.parts if part is not None]
    lines = [
        f'<text{_ours(bar.ours)} x="0" y="{top + _TEXT}">{escape(bar.label)}</text>',
        f'<text x="100%" y="{top + _TEXT}" text-anchor="end">{" + ".join(numbers) or bar.status}</text>',
    ]
    left = 0.0
    for index, part in enumerate(bar.parts):
        if part is not None:
            width = max(0.0, part.value * scale)
            fill = f"p{index}" if in_parts else "ours" if bar.ours else "peer"
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
