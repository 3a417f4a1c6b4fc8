"""``holdfast bench [DIR]``: Holdfast beside its alternatives. The measuring is `holdfast.study.bench`'s."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.session import Json, session


class Shape(str, Enum):
    """What the state looks like; `holdfast.study.states` builds them."""

    gpt2 = "gpt2"
    few_large = "few-large"
    many_small = "many-small"


def bench(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", show_default=False, help="On the device to measure; default: here."),
    ] = Path("."),
    size: Annotated[
        str | None,
        typer.Option("--size", help="Bytes of the state: 256M, 1.5GiB. Default: 1 GiB, or the shape's own."),
    ] = None,
    shape: Annotated[
        Shape, typer.Option("--shape", help="Tensors of a GPT-2 with Adam, or few, or many.")
    ] = Shape.gpt2,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Rounds; all systems take turns in each.")
    ] = 5,
    system: Annotated[
        list[str] | None, typer.Option("--system", help="Only this one; may be given again.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw a .png or .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Measure saving and loading, side by side with the alternatives.

    Every system is durable: file and directory are synced. Needs about four times the size in free space.
    Exit code 1 when Holdfast misses one of its promises.
    """
    with session(as_json) as out:
        from holdfast.study.bench import BenchOptions, choose, parse_size, run
        from holdfast.study.plot import SUFFIXES
        from holdfast.study.report import render, to_json
        from holdfast.study.states import shapes_of

        try:
            choose(system or ())
            nbytes = None if size is None else parse_size(size)
            shapes_of(shape.value, nbytes)
            if plot is not None and plot.suffix.lower() not in SUFFIXES:
                raise ValueError(f"--plot {plot}: the suffix must be one of {', '.join(SUFFIXES)}")
            options = BenchOptions(
                directory=directory,
                nbytes=nbytes,
                shape=shape.value,
                rounds=repeat,
                systems=tuple(system or ()),
                plot=plot,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        try:
            result = run(options, out.errors)
        except (MemoryError, RuntimeError) as error:  # a state too large, a picture without matplotlib
            out.fail(type(error).__name__, str(error))
        if as_json:
            print(to_json(result).decode(), end="")
        else:
            out.console.print(render(result))
        out.finish(problem=any(bar.verdict == "FAIL" for bar in result.bars))
