"""``everystep shelf ls|show|verify|export FILE``: what a shelf holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, Session, session

if TYPE_CHECKING:
    from everystep.shelf.contents import EntryInfo, ShelfListing

shelf = typer.Typer(no_args_is_help=True, help="Shelves: state in a mapped file. All take --json.")

File = Annotated[Path, typer.Argument(readable=False, metavar="FILE", help="The shelf.")]


@shelf.command()
def ls(file: File, as_json: Json = False) -> None:
    """List the entries of a shelf, without reading their data."""
    with session(as_json) as out:
        from everystep.shelf import contents

        found = contents.listing(file)
        if as_json:
            out.emit(found)
        else:
            _print_entries(out, found)
        out.finish(problem=False)


@shelf.command()
def show(
    file: File,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this entry.")] = None,
    as_json: Json = False,
) -> None:
    """Show the values of a shelf, its arrays in short, and how much space it uses."""
    with session(as_json) as out:
        from everystep.shelf import contents

        found, values = contents.values(file, name)
        if name is not None and not values:
            out.fail("KeyError", f"the shelf {file} has no entry {name!r}")
        shown = {entry: _text(value) for entry, value in values.items()}
        if as_json:
            out.emit({"path": found.path, "medium": found.medium, "usage": found.usage, "values": shown})
        else:
            _print_values(out, found, shown, name is None)
        out.finish(problem=False)


@shelf.command()
def verify(file: File, as_json: Json = False) -> None:
    """Read and check every byte of a shelf. Exit code 1 if anything is damaged."""
    with session(as_json) as out:
        from everystep.cli import words
        from everystep.shelf import contents

        found = contents.verify(file)
        if as_json:
            out.emit(found)
        else:
            for name, reason in found.damaged:
                out.say(f"damaged: {words.plain(name)}: {reason}", style="red")
            if found.warning:
                out.say(_passed_over(found.warning), style="red")
            if not found.damaged:
                amount = f"{words.count(found.entries, 'entry', 'entries')}, {words.size(found.nbytes)}"
                out.say(f"intact: {amount}", style="green")
        out.finish(problem=bool(found.damaged or found.warning))


@shelf.command()
def export(
    file: File,
    output: Annotated[
        Path, typer.Argument(readable=False, metavar="OUT", help="A .npz or .safetensors file to write.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write the arrays of a shelf, and its values, to a file that other tools read."""
    with session(as_json) as out:
        from everystep.cli import words
        from everystep.shelf import contents

        try:
            done = contents.export(file, output, force=force)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            out.fail("ValueError", str(error))
        if as_json:
            out.emit(done)
        else:
            amount = f"{words.count(done.arrays, 'array')}, {words.size(done.nbytes)}"
            out.say(f"{words.plain(done.output)}: {amount}")
            for name in done.left_out:
                out.say(f"left out: {words.plain(name)}, which a .npz file cannot hold", style="yellow")
        out.finish(problem=False)


def _passed_over(warning: str) -> str:
    return f"the newest commit is not complete or is damaged ({warning}); this is the one before it"


def _text(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "(too long to print)"


def _shape(entry: EntryInfo) -> str:
    from everystep.cli import words

    return "" if entry.shape is None else words.shape(entry.shape)


def _print_entries(out: Session, found: ShelfListing) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    rows = table(
        "entry", "type", "dtype", "shape", "size", "commit", right=("size", "commit"), fold=("entry",)
    )
    for entry in found.entries:
        dtype, size = entry.dtype or "", words.size(entry.nbytes)
        commit = str(entry.generation - 1)  # the first generation is the new, empty shelf
        rows.add_row(words.plain(entry.name), entry.type, dtype, _shape(entry), size, commit)
    out.tabulate(rows)
    _print_usage(out, found)


def _print_values(out: Session, found: ShelfListing, shown: dict[str, str], usage: bool) -> None:
    from everystep.cli import words

    for name, text in shown.items():
        out.say(f"{words.plain(name)} = {words.plain(text)}")
    if usage:
        _print_usage(out, found)


def _print_usage(out: Session, found: ShelfListing) -> None:
    from everystep.cli import words

    usage = found.usage
    if found.warning:
        out.say(_passed_over(found.warning), style="yellow")
    out.say(
        f"{words.count(usage.entries, 'entry', 'entries')}, file {words.size(usage.file)} of at most "
        f"{words.size(usage.limit)}, commit {usage.generation - 1:,}, on {found.medium}",
        style="dim",
    )
