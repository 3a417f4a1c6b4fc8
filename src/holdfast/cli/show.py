"""``holdfast show PATH``: what a checkpoint holds, without reading its arrays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.session import Json, Session, session

if TYPE_CHECKING:
    from holdfast.format.records import ShardFile
    from holdfast.store import Checkpoint

_MANY = 100
"""Rows beyond this are shown when asked for: a large model has thousands."""
_VALUE_WIDTH = 160


def show(
    path: Annotated[
        Path, typer.Argument(readable=False, metavar="PATH", help="A checkpoint, or a run: its newest.")
    ],
    leaves: Annotated[
        str | None, typer.Option("--leaves", metavar="GLOB", help="Only the leaves that match, all of them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every row, however many.")] = False,
    as_json: Json = False,
) -> None:
    """What a checkpoint holds: facts, values, and the table of its leaves."""
    with session(as_json) as out:
        import holdfast
        from holdfast.cli.listing import leaf_order

        with holdfast.open(path) as checkpoint:
            matching = None if leaves is None else set(checkpoint.select(leaves))
            chosen = [name for name in leaf_order(checkpoint) if matching is None or name in matching]
            if as_json:
                out.emit(_document(checkpoint, chosen))
            else:
                if leaves is None:
                    _print_facts(out, checkpoint)
                    _print_values(out, checkpoint, everything)
                _print_leaves(out, checkpoint, chosen, everything or leaves is not None)
        out.finish(problem=False)


def _document(checkpoint: Checkpoint, chosen: list[str]) -> dict[str, object]:
    from holdfast.cli.comparing import value_nodes

    root = checkpoint.root
    return {
        "path": checkpoint.path,
        "format": root.format,
        "id": checkpoint.id,
        "step": checkpoint.step,
        "created": checkpoint.created,
        "world": root.world,
        "metrics": checkpoint.metrics,
        "nbytes": checkpoint.nbytes,
        "stored_nbytes": checkpoint.stored_nbytes,
        "files": [_file(file) for part in checkpoint.parts for file in part.files],
        "values": value_nodes(checkpoint),
        "leaves": [{"name": name, **_leaf(checkpoint, name)} for name in chosen],
    }


def _file(file: ShardFile) -> dict[str, object]:
    found: dict[str, object] = {"name": file.name, "nbytes": file.nbytes}
    if file.volume is not None:
        found.update(volume=file.volume, host=file.host)
    return found


def _leaf(checkpoint: Checkpoint, name: str) -> dict[str, object]:
    info = checkpoint.leaves[name]
    return {
        "dtype": info.dtype,
        "shape": info.shape,
        "nbytes": info.nbytes,
        "framework": info.framework,
        "alias_of": info.alias_of,
    }


def _print_facts(out: Session, checkpoint: Checkpoint) -> None:
    import math
    import time

    from holdfast.cli import words
    from holdfast.cli.session import facts

    stored = [info for info in checkpoint.leaves.values() if info.alias_of is None]
    by_type: Counter[str] = Counter()
    for info in stored:
        by_type[info.dtype] += math.prod(info.shape)
    tied = len(checkpoint.leaves) - len(stored)
    rows = [
        ("checkpoint", words.plain(checkpoint.path)),
        ("step", f"{checkpoint.step:,}"),
        ("saved", f"{words.moment(checkpoint.created)}, {words.age(time.time() - checkpoint.created)}"),
        ("id", checkpoint.id),
        ("metrics", words.metrics(checkpoint.metrics) or "none"),
        (
            "leaves",
            words.count(len(stored), "leaf", "leaves")
            + (f", and {words.count(tied, 'name')} tied to them" if tied else ""),
        ),
        (
            "elements",
            ", ".join(f"{number:,} {words.plain(name)}" for name, number in by_type.most_common()) or "none",
        ),
        ("size", f"{words.size(checkpoint.nbytes)}, {words.size(checkpoint.stored_nbytes)} in shards"),
        *_ranks(checkpoint),
        ("format", checkpoint.root.format),
    ]
    out.console.print(facts(rows))


def _ranks(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Who wrote it and where, unless it was one process to one place."""
    from holdfast.cli import words

    files = [file for part in checkpoint.parts for file in part.files]
    volumes = {file.volume for file in files}
    if checkpoint.world == 1 and volumes <= {None}:
        return []
    written = f"{words.count(checkpoint.world, 'rank')}, {words.count(len(files), 'shard')}"
    if volumes <= {None}:
        return [("written by", written)]
    places = [
        *(["the checkpoint's own"] if None in volumes else []),
        *sorted(words.plain(volume) for volume in volumes if volume is not None),
    ]
    shown = ", ".join(places[:8]) + (f" {words.ELLIPSIS}" if len(places) > 8 else "")
    return [("written by", f"{written} on {words.count(len(volumes), 'volume')}"), ("volumes", shown)]


def _print_values(out: Session, checkpoint: Checkpoint, everything: bool) -> None:
    from holdfast.cli import words
    from holdfast.cli.session import table

    rows = table("value", "type", "is", fold=("value", "is"))
    shown = list(checkpoint.values.items())
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


def _print_leaves(out: Session, checkpoint: Checkpoint, chosen: list[str], everything: bool) -> None:
    from holdfast.cli import words
    from holdfast.cli.session import table

    limit = len(chosen) if everything else _MANY
    rows = table("leaf", "dtype", "shape", "size", "from", right=("size",), fold=("leaf",))
    for name in chosen[:limit]:
        info = checkpoint.leaves[name]
        named = words.plain(name) + (f" = {words.plain(info.alias_of)}" if info.alias_of else "")
        shape, size = words.shape(info.shape), words.size(info.nbytes)
        rows.add_row(named, words.plain(info.dtype), shape, size, info.framework)
    if chosen:
        out.console.print()
        out.tabulate(rows)
    _mention_rest(out, len(chosen) - limit, "leaf", "leaves")
    if everything and len(chosen) != len(checkpoint.leaves):
        stored = sum(
            checkpoint.leaves[name].nbytes for name in chosen if checkpoint.leaves[name].alias_of is None
        )
        out.console.print()
        every = words.count(len(checkpoint.leaves), "leaf", "leaves")
        out.say(f"{len(chosen):,} of {every}, {words.size(stored)}")


def _mention_rest(out: Session, rest: int, noun: str, plural: str) -> None:
    from holdfast.cli import words

    if rest > 0:
        out.say(
            f"{words.ELLIPSIS} and {words.count(rest, noun, plural)} more (--all shows them)", style="dim"
        )
