"""``everystep export PATH OUT``: leaves as one file that other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, MaxInflation, Session, session

if TYPE_CHECKING:
    from everystep.inspect import Exported


def export(
    path: Annotated[
        Path, typer.Argument(readable=False, metavar="PATH", help="A checkpoint, or a run: its newest.")
    ],
    output: Annotated[
        Path, typer.Argument(readable=False, metavar="OUT.safetensors", help="The file to write.")
    ],
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="GLOB",
            help="Only leaves that match or are in this subtree; may be given again.",
        ),
    ] = None,
    strip: Annotated[
        str,
        typer.Option(
            "--strip", metavar="PREFIX", help="Take this off all names, such as model. with its dot."
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    max_inflation: MaxInflation = 100,
    as_json: Json = False,
) -> None:
    """Write the leaves as one .safetensors file.

    The file appears whole or not at all, and every byte is verified on the way. Tied leaves are written once,
    under their first name; the others are listed in the file's metadata, next to the step.
    """
    with session(as_json) as out:
        import time

        from everystep import Options, inspect

        began = time.perf_counter()
        if output.suffix != inspect.safetensors_export.SUFFIX:
            raise typer.BadParameter(inspect.safetensors_export.wrong_suffix(output))
        options = Options(max_inflation=max_inflation)
        with out.progress("exporting") as progress:
            done = inspect.export(
                path,
                output,
                select=select,
                strip=strip,
                force=force,
                options=options,
                progress=progress,
            )
        if as_json:
            out.emit(done)
        else:
            _print(out, done, time.perf_counter() - began)
        out.finish(problem=False)


def _print(out: Session, done: Exported, seconds: float) -> None:
    from everystep.cli import words

    amount = f"{words.count(done.leaves, 'leaf', 'leaves')}, {words.size(done.nbytes)}"
    # The speed of a very short export means nothing.
    speed = f", {words.speed(done.nbytes, seconds)}" if done.nbytes > 100_000_000 else ""
    step = "" if done.step is None else f" of {words.step(done.step)}"
    out.say(f"{words.plain(done.path)}: {amount}{step}{speed}")
    for name, other in done.tied.items():
        out.say(f"{words.plain(name)} is tied to {words.plain(other)} and written once", style="dim")
