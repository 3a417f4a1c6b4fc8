"""``holdfast bench [DIR]``: Holdfast beside its alternatives, alone, in a training, or on several ranks.

The measuring is `holdfast.study.bench`'s, `holdfast.study.training`'s and `holdfast.study.ranks`'s; here are
only the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.session import Json, Session, session

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast.study.results import Bar

_TRAINING = "Training"


class Shape(str, Enum):
    """What the state looks like; `holdfast.study.states` builds them."""

    gpt2 = "gpt2"
    few_large = "few-large"
    many_small = "many-small"


def bench(
    directory: Annotated[
        Path,
        typer.Argument(
            readable=False, metavar="DIR", show_default=False, help="On the device to measure; default: here."
        ),
    ] = Path("."),
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="Bytes of the state: 256M, 1.5GiB. Default: 1 GiB, or the shape's own; in a training 400M.",
        ),
    ] = None,
    shape: Annotated[
        Shape | None,
        typer.Option("--shape", help="Tensors of a GPT-2 with Adam (the default), or few, or many."),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            "--rounds",
            min=1,
            help="Rounds; all systems take turns in each. Default: 5; in a training 4; with ranks 3.",
        ),
    ] = None,
    system: Annotated[
        list[str] | None, typer.Option("--system", help="Only this one; may be given again.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", readable=False, help="Also draw a .png or .svg.")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            metavar="N,N,...",
            help="So many processes that save and load one replicated state together, such as 1,2,4.",
        ),
    ] = None,
    training: Annotated[
        bool,
        typer.Option(
            "--training",
            help="What a checkpoint after every step costs a training.",
            rich_help_panel=_TRAINING,
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A small model, about a minute.", rich_help_panel=_TRAINING),
    ] = False,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Of the model.", rich_help_panel=_TRAINING)
    ] = None,
    width: Annotated[
        int | None,
        typer.Option("--width", min=64, help="Of the model, a multiple of 64.", rich_help_panel=_TRAINING),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            help="Sequences per step. Default: so many that a step takes about 1.5 s.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option("--sequence", min=1, help="Tokens each. Default: 128.", rich_help_panel=_TRAINING),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Counted steps of each system in each round. Default: 3.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    sweep: Annotated[
        bool | None,
        typer.Option(
            "--sweep/--no-sweep",
            help="How far a checkpoint can outgrow a step. Default: yes.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts",
            min=0,
            help="How often trainings are killed and timed until they go on. Default: 2.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure saving and loading, side by side with the alternatives.

    Every system is durable: file and directory are synced. Needs about four times the size in free space; in
    a training (about six minutes) sixteen times, as with 1,2,4 ranks, which hold it in memory four times.
    Exit code 1 when Holdfast misses one of its promises.
    """
    told = _Training(quick, layers, width, batch, sequence, steps, sweep, restarts)
    with session(as_json) as out:
        if ranks is not None:
            if training or shape is not None or told != _Training():
                raise typer.BadParameter("--ranks goes with neither --training and its options nor --shape")
            _bench_ranks(out, ranks, directory, size, repeat, tuple(system or ()), plot)
        elif training:
            if shape is not None:
                raise typer.BadParameter("--shape is for saving alone; --training has a model of its own")
            _bench_training(out, directory, size, repeat, tuple(system or ()), plot, told)
        else:
            if told != _Training():
                raise typer.BadParameter(f"{', '.join(told.given)} only with --training")
            _bench_alone(out, directory, size, shape or Shape.gpt2, repeat, tuple(system or ()), plot)


@dataclass(frozen=True)
class _Training:
    """The options that only a training has; as they are here, none was given."""

    quick: bool = False
    layers: int | None = None
    width: int | None = None
    batch: int | None = None
    sequence: int | None = None
    steps: int | None = None
    sweep: bool | None = None
    restarts: int | None = None

    @property
    def given(self) -> list[str]:
        named = [
            f"--{name}" for name, value in vars(self).items() if value is not None and value is not False
        ]
        return [*named, *(["--no-sweep"] if self.sweep is False else [])]


def _bench_alone(
    out: Session,
    directory: Path,
    size: str | None,
    shape: Shape,
    repeat: int | None,
    systems: tuple[str, ...],
    plot: Path | None,
) -> None:
    from holdfast.study.bench import BenchOptions, choose, parse_size, run
    from holdfast.study.picture import check_suffix
    from holdfast.study.report import render, to_json
    from holdfast.study.states import shapes_of

    try:
        choose(systems)
        nbytes = None if size is None else parse_size(size)
        shapes_of(shape.value, nbytes)
        if plot is not None:
            check_suffix(plot)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    options = BenchOptions(directory=directory, nbytes=nbytes, shape=shape.value, systems=systems, plot=plot)
    if repeat is not None:
        options = replace(options, rounds=repeat)
    try:
        result = run(options, out.errors)
    except (MemoryError, RuntimeError) as error:  # a state too large, a picture without matplotlib
        out.fail(type(error).__name__, str(error))
    _finish(out, to_json(result) if out.as_json else render(result), result.bars)


def _bench_training(
    out: Session,
    directory: Path,
    size: str | None,
    repeat: int | None,
    systems: tuple[str, ...],
    plot: Path | None,
    told: _Training,
) -> None:
    from holdfast.study.bench import parse_size
    from holdfast.study.training.report import render, to_json
    from holdfast.study.training.training import QUICK, TrainingOptions, check, run

    try:
        given = {name: value for name, value in vars(told).items() if value is not None and name != "quick"}
        if size is not None:
            given["nbytes"] = parse_size(size)
        if repeat is not None:
            given["rounds"] = repeat
        options = replace(
            QUICK if told.quick else TrainingOptions(),
            directory=directory,
            systems=systems,
            plot=plot,
            **given,
        )
        check(options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        result = run(options, out.errors)
    except (MemoryError, RuntimeError) as error:  # as above, or no torch
        out.fail(type(error).__name__, str(error))
    _finish(out, to_json(result) if out.as_json else render(result), result.bars)


def _bench_ranks(
    out: Session,
    ranks: str,
    directory: Path,
    size: str | None,
    repeat: int | None,
    systems: tuple[str, ...],
    plot: Path | None,
) -> None:
    from holdfast.study.bench import parse_size
    from holdfast.study.ranks.bench import RanksOptions, check, parse_ranks, run
    from holdfast.study.ranks.report import render, to_json

    try:
        options = RanksOptions(parse_ranks(ranks), directory, systems=systems, plot=plot)
        if size is not None:
            options = replace(options, nbytes=parse_size(size))
        if repeat is not None:
            options = replace(options, rounds=repeat)
        check(options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        result = run(options, out.errors)
    except (MemoryError, RuntimeError) as error:  # as above, or ranks that cannot be started at all
        out.fail(type(error).__name__, str(error))
    _finish(out, to_json(result) if out.as_json else render(result), result.bars)


def _finish(out: Session, said: bytes | RenderableType, bars: Sequence[Bar]) -> None:
    if isinstance(said, bytes):
        print(said.decode(), end="")
    else:
        out.console.print(said)
    out.finish(problem=any(bar.verdict == "FAIL" for bar in bars))
