"""``everystep show PATH``: what a checkpoint holds, without reading its arrays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, MaxInflation, Session, session

if TYPE_CHECKING:
    from everystep.format.records import ShardFile
    from everystep.inspect import Description

_MANY = 100
"""Further rows are shown on request: a large model has thousands."""
_MANY_SUBTREES = 40
_VALUE_WIDTH = 160


def show(
    path: Annotated[
        Path, typer.Argument(readable=False, metavar="PATH", help="A checkpoint, or a run: its newest.")
    ],
    leaves: Annotated[
        str | None,
        typer.Option("--leaves", metavar="GLOB", help="Only the leaves that match or are in this subtree."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option("--depth", min=1, metavar="N", help="Only totals, by the first N parts of the names."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every row, however many.")] = False,
    as_training: Annotated[
        bool | None,
        typer.Option(
            "--as-training/--as-saved",
            help="Another system's file: arranged into model and optimizer, or as its library loads it.",
        ),
    ] = None,
    max_inflation: MaxInflation = 100,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds: facts, totals per subtree, values, and the table of its leaves."""
    with session(as_json) as out:
        from everystep import Options, inspect

        options = Options(max_inflation=max_inflation)
        found = inspect.describe(path, leaves=leaves, as_training=as_training, options=options)
        if as_json:
            out.emit(_document(found, depth))
        elif depth is not None:
            _print_subtotals(out, found, depth)
        else:
            if leaves is None:
                _print_facts(out, found)
                _print_subtotals(out, found)
                _print_values(out, found, everything)
                if found.leaves:
                    out.console.print()
            _print_leaves(out, found, everything or leaves is not None)
        out.finish(problem=False)


def _document(found: Description, depth: int | None) -> dict[str, object]:
    from msgspec import to_builtins

    from everystep.inspect.description import stored_values

    return {
        "path": found.path,
        "format": found.format,
        "id": found.id,
        "step": found.step,
        "created": found.created,
        "world": found.world,
        "metrics": found.metrics,
        "nbytes": found.nbytes,
        "stored_nbytes": found.stored_nbytes,
        "files": [_file(file) for file in found.files],
        "values": stored_values(found.values),
        **({"facts": dict(found.facts)} if found.facts else {}),
        "subtrees": found.subtotals(depth),
        "leaves": [{"name": name, **to_builtins(info)} for name, info in found.leaves.items()],
    }


def _file(file: ShardFile) -> dict[str, object]:
    found: dict[str, object] = {"name": file.name, "nbytes": file.nbytes}
    if file.volume is not None:
        found.update(volume=file.volume, host=file.host)
    return found


def _print_facts(out: Session, found: Description) -> None:
    import math
    import time

    from everystep.cli import words
    from everystep.cli.session import facts

    stored = [info for info in found.leaves.values() if info.alias_of is None]
    by_type: Counter[str] = Counter()
    for info in stored:
        by_type[info.dtype] += math.prod(info.shape)
    tied = len(found.leaves) - len(stored)
    rows = [
        ("checkpoint", words.plain(found.path)),
        ("step", "not stated" if found.step is None else f"{found.step:,}"),
        ("saved", f"{words.moment(found.created)}, {words.age(time.time() - found.created)}"),
        ("id", found.id),
        ("metrics", words.metrics(found.metrics) or "none"),
        (
            "leaves",
            words.count(len(stored), "leaf", "leaves")
            + (f", and {words.count(tied, 'name')} tied to them" if tied else ""),
        ),
        (
            "elements",
            ", ".join(f"{number:,} {words.plain(name)}" for name, number in by_type.most_common()) or "none",
        ),
        ("size", f"{words.size(found.nbytes)}, {words.size(found.stored_nbytes)} in shards"),
        *_ranks(found),
        *((words.plain(name), words.plain(fact)) for name, fact in found.facts.items()),
        *([] if found.facts else [("format", found.format)]),
    ]
    out.show(facts(rows))


def _print_subtotals(out: Session, found: Description, depth: int | None = None) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    totals = found.subtotals(depth)
    if depth is None and not 1 < len(totals) <= min(_MANY_SUBTREES, len(found.leaves) - 1):
        return  # the table of leaves says the same
    columns = ("leaves", "elements", "size")
    rows = table("subtree", *columns, right=columns, fold=("subtree",))
    for total in totals:
        rows.add_row(
            words.plain(total.name), f"{total.leaves:,}", f"{total.elements:,}", words.size(total.nbytes)
        )
    if depth is None:
        out.console.print()
    out.tabulate(rows)


def _ranks(found: Description) -> list[tuple[str, str]]:
    """Which ranks wrote it and where, unless one process wrote it to one place."""
    from everystep.cli import words

    files = found.files
    volumes = {file.volume for file in files}
    if found.world == 1 and volumes <= {None}:
        return []
    written = f"{words.count(found.world, 'rank')}, {words.count(len(files), 'shard')}"
    if volumes <= {None}:
        return [("written by", written)]
    places = [
        *(["the checkpoint's own"] if None in volumes else []),
        *sorted(words.plain(volume) for volume in volumes if volume is not None),
    ]
    shown = ", ".join(places[:8]) + (f" {words.ELLIPSIS}" if len(places) > 8 else "")
    return [("written by", f"{written} on {words.count(len(volumes), 'volume')}"), ("volumes", shown)]


def _print_values(out: Session, found: Description, everything: bool) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    rows = table("value", "type", "is", fold=("value", "is"))
    shown = list(found.values.items())
    if not shown:
        return
    limit = len(shown) if everything else _MANY
    for name, value in shown[:limit]:
        text = words.plain(_text(value))
        if not everything:
            text = words.shortened(text, _VALUE_WIDTH)
        rows.add_row(words.plain(name), type(value).__name__, text)
    out.console.print()
    out.tabulate(rows)
    _mention_rest(out, len(shown) - limit, "value", "values")


def _text(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "(too long to print)"


def _print_leaves(out: Session, found: Description, everything: bool) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    chosen = list(found.leaves.items())
    limit = len(chosen) if everything else _MANY
    rows = table("leaf", "dtype", "shape", "size", "from", right=("size",), fold=("leaf",))
    for name, info in chosen[:limit]:
        named = words.plain(name) + (f" = {words.plain(info.alias_of)}" if info.alias_of else "")
        shape, size = words.shape(info.shape), words.size(info.nbytes)
        rows.add_row(named, words.plain(info.dtype), shape, size, info.framework)
    if chosen:
        out.tabulate(rows)
    _mention_rest(out, len(chosen) - limit, "leaf", "leaves")
    if everything and len(chosen) != found.all_leaves:
        stored = sum(info.nbytes for _, info in chosen if info.alias_of is None)
        out.console.print()
        every = words.count(found.all_leaves, "leaf", "leaves")
        out.say(f"{len(chosen):,} of {every}, {words.size(stored)}")


def _mention_rest(out: Session, rest: int, noun: str, plural: str) -> None:
    from everystep.cli import words

    if rest > 0:
        out.say(
            f"{words.ELLIPSIS} and {words.count(rest, noun, plural)} more (--all shows them)", style="dim"
        )
