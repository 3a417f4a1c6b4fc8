"""``everystep diff A B``: which leaves and values differ, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, MaxInflation, Session, session

if TYPE_CHECKING:
    from everystep.inspect import ContainerChange, Difference, LeafChange, Side, SubtreeChange, ValueChange
    from everystep.state import Node

_MANY = 100
_VALUE_WIDTH = 60


def diff(
    a: Annotated[
        Path, typer.Argument(readable=False, metavar="A", help="A checkpoint, or a run: its newest.")
    ],
    b: Annotated[Path, typer.Argument(readable=False, metavar="B", help="Another one.")],
    leaves: Annotated[
        list[str] | None,
        typer.Option(
            "--leaves", metavar="GLOB", help="Only what matches or is in this subtree; may be given again."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="GLOB", help="Leave out what matches; may be given again."),
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="One row for each subtree instead of each leaf.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every row, however many.")] = False,
    max_inflation: MaxInflation = 100,
    as_json: Json = False,
) -> None:
    """Show which leaves and values differ, and by how much. Exit code 1 if any does.

    Leaves are compared bit by bit: NaNs with the same payload are equal, 0.0 and -0.0 are not.
    The order of keys counts in an OrderedDict, not in a plain dict. Step, time and metrics may differ.
    Neither checkpoint has to fit in memory.
    """
    with session(as_json) as out:
        from everystep import Options, inspect

        options = Options(max_inflation=max_inflation)
        with out.progress("comparing") as progress:
            found = inspect.compare(
                a,
                b,
                leaves=leaves or (),
                ignore=ignore or (),
                options=options,
                progress=progress,
            )
        if as_json:
            out.emit(_document(found))
        else:
            _print(out, found, everything, summary, partial=bool(leaves or ignore))
        out.finish(problem=not found.equal)


def _document(found: Difference) -> dict[str, object]:
    return {
        "equal": found.equal,
        "a": found.a,
        "b": found.b,
        "identical": found.identical,
        "leaves": found.leaves,
        "values": found.values,
        "structure": found.structure,
        "subtrees": found.subtrees(),
    }


def _print(out: Session, found: Difference, everything: bool, summary: bool, *, partial: bool) -> None:
    from everystep.cli import words
    from everystep.cli.session import facts

    out.show(facts([("A", _side(found.a)), ("B", _side(found.b))]))
    if summary:
        _print_subtrees(out, found.subtrees())
    elif found.leaves:
        _print_leaves(out, found.leaves, len(found.leaves) if everything else _MANY)
    if found.values and not summary:
        _print_values(out, found.values, len(found.values) if everything else _MANY)
    if found.structure and not summary:
        _print_containers(out, found.structure, len(found.structure) if everything else _MANY)
    out.console.print()
    if found.equal:
        leaves = words.count(found.identical, "leaf", "leaves")
        compared = f"{leaves}, and the values that were compared" if partial else f"{leaves} and all values"
        out.say(f"equal, bit for bit: {compared}", style="green")
        return
    differing = words.count(len({change.name for change in found.leaves}), "leaf differs", "leaves differ")
    parts = [
        differing,
        f"{found.identical:,} identical",
        words.count(len(found.values), "value differs", "values differ"),
    ]
    out.say(", ".join(parts))
    if found.structure:
        count = words.count(len(found.structure), "container differs", "containers differ")
        out.say(f"{count}, though all leaves and values in them are the same")


def _print_subtrees(out: Session, changes: tuple[SubtreeChange, ...]) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    columns = ("leaves", "differ", "only in A", "only in B", "max abs", "max rel")
    rows = table("subtree", *columns, right=columns, fold=("subtree",))
    for change in changes:
        counts = (change.leaves, change.differing, change.only_a, change.only_b)
        amounts = (words.number(change.max_abs), words.number(change.max_rel))
        rows.add_row(
            words.plain(change.name), *(f"{count:,}" if count else "-" for count in counts), *amounts
        )
    out.console.print()
    out.tabulate(rows)


def _side(side: Side) -> str:
    from everystep.cli import words

    return f"{words.plain(side.path)}, {words.step(side.step)}, saved {words.moment(side.created)}"


def _print_leaves(out: Session, changes: tuple[LeafChange, ...], limit: int) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    rows = table(
        "leaf",
        "what",
        "elements",
        "max abs",
        "max rel",
        right=("elements", "max abs", "max rel"),
        fold=("leaf", "what"),
    )
    for change in changes[:limit]:
        rows.add_row(words.plain(change.name), _what(change), *_amounts(change))
    out.console.print()
    out.tabulate(rows)
    if len(changes) > limit:
        out.say(f"{words.ELLIPSIS} and {len(changes) - limit:,} more (--all shows them)", style="dim")


def _what(change: LeafChange) -> str:
    from everystep.cli import words

    match change.change:
        case "only in a":
            return f"only in A: {change.a}"
        case "only in b":
            return f"only in B: {change.b}"
        case "bits":
            first = f"first at {words.shape(change.first)}" if change.first else ""
            odd = f"{change.not_finite:,} not finite" if change.not_finite else ""
            return ", ".join(filter(None, (first, odd))) or "differs"
        case "tied":
            sides = [f"tied to {words.plain(of)}" if of else "not tied" for of in (change.a, change.b)]
            return f"A: {sides[0]}, B: {sides[1]}"
        case _:
            return f"{change.a} / {change.b}"


def _amounts(change: LeafChange) -> tuple[str, str, str]:
    from everystep.cli import words

    if change.differing is None or not change.elements:
        return "", "", ""
    share = 100 * change.differing / change.elements
    percent = f"{share:.0f}%" if share >= 10 else f"{share:.1f}%" if share >= 0.05 else "<0.1%"
    return f"{change.differing:,} ({percent})", words.number(change.max_abs), words.number(change.max_rel)


def _print_values(out: Session, changes: tuple[ValueChange, ...], limit: int) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    rows = table("value", "A", "B", fold=("value", "A", "B"))
    for change in changes[:limit]:
        mine = "" if change.change == "only in b" else _node(change.a)
        other = "" if change.change == "only in a" else _node(change.b)
        rows.add_row(words.plain(change.name), mine or "-", other or "-")
    out.console.print()
    out.tabulate(rows)
    if len(changes) > limit:
        out.say(f"{words.ELLIPSIS} and {len(changes) - limit:,} more (--all shows them)", style="dim")


def _print_containers(out: Session, changes: tuple[ContainerChange, ...], limit: int) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    rows = table("container", "A", "B", fold=("container", "A", "B"))
    for change in changes[:limit]:
        rows.add_row(*(words.plain(text) for text in (change.name, change.a, change.b)))
    out.console.print()
    out.tabulate(rows)
    if len(changes) > limit:
        out.say(f"{words.ELLIPSIS} and {len(changes) - limit:,} more (--all shows them)", style="dim")


def _node(node: Node) -> str:
    from everystep.cli import words
    from everystep.inspect.description import exact_bytes

    return words.shortened(words.plain(exact_bytes(node).decode()), _VALUE_WIDTH)
