"""``everystep bench [DIR]``: Everystep beside its alternatives. Only the options."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everystep.cli.plugins import Plugin
from everystep.cli.session import Json, Session, session

if TYPE_CHECKING:
    from everystep_study.harness.suite import Suite

_train = partial(typer.Option, rich_help_panel="Training")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Shape(str, Enum):
    """What the state looks like; `everystep_study.mechanisms.states` builds them."""

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
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare with what Everystep promises; exit code 1 if it falls short."),
    ] = False,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            readable=False,
            help="Measure everything and write it as a page; --size is for saving alone.",
        ),
    ] = None,
    convert: Annotated[
        bool,
        typer.Option("--convert", help="Convert checkpoints of DeepSpeed, beside its own converter."),
    ] = False,
    deepspeed: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed",
            readable=False,
            metavar="PYTHON",
            help="Of an environment with DeepSpeed. Default: that of make peers.",
        ),
    ] = None,
    clusters: Annotated[
        bool,
        typer.Option("--clusters", help="A checkpoint per iteration of KMeans and mixtures, on a shelf."),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", readable=False, help="Rows to cluster (.npy, .npz); only with --clusters."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds.")] = False,
    training: Annotated[
        bool, _train("--training", help="What a checkpoint after every step costs a training.")
    ] = False,
    layers: Annotated[int | None, _train("--layers", min=1, help="Of the model.")] = None,
    width: Annotated[int | None, _train("--width", min=64, help="Of the model, a multiple of 64.")] = None,
    batch: Annotated[
        int | None,
        _train("--batch", min=1, help="Sequences per step. Default: so many that a step takes about 1.5 s."),
    ] = None,
    sequence: Annotated[int | None, _train("--sequence", min=1, help="Tokens each. Default: 128.")] = None,
    steps: Annotated[
        int | None, _train("--steps", min=1, help="Counted steps of each system in each round. Default: 3.")
    ] = None,
    sweep: Annotated[
        bool | None,
        _train("--sweep/--no-sweep", help="How far a checkpoint can outgrow a step. Default: yes."),
    ] = None,
    restarts: Annotated[
        int | None,
        _train("--restarts", min=0, help="How often trainings are killed and restarted. Default: 2."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure saving and loading, side by side with the alternatives.

    Every system is durable: file and directory are synced. Needs about four times the size in free space; in
    a training (about six minutes) sixteen times, as with 1,2,4 ranks, which hold it in memory four times.
    Exit code 1 when Everystep fails, or with --check falls short of a promise.
    """
    model = {
        "layers": layers,
        "width": width,
        "batch": batch,
        "sequence": sequence,
        "steps": steps,
        "sweep": sweep,
        "restarts": restarts,
    }
    from everystep_study.suites.clusters import ClustersSuite
    from everystep_study.suites.convert import ConvertSuite
    from everystep_study.suites.ranks import RanksSuite
    from everystep_study.suites.save_load import SaveLoadSuite
    from everystep_study.suites.training import TrainingSuite

    only_training = {name: value for name, value in model.items() if value is not None}
    common = {"rounds": repeat, "systems": tuple(system) if system else None}
    with session(as_json) as out:
        if markdown is not None and (as_json or plot or system or shape):
            raise typer.BadParameter("--markdown goes with neither --json, --plot, --system nor --shape")
        if only_training and not training and markdown is None:
            names = ", ".join(
                "--no-sweep" if value is False else f"--{name}" for name, value in only_training.items()
            )
            raise typer.BadParameter(f"{names} only with --training")
        chosen = training + clusters + convert + bool(ranks) + bool(shape)
        if markdown is None and chosen > 1:
            raise typer.BadParameter("choose one of --training, --ranks, --clusters, --convert and --shape")
        if data is not None and not clusters:
            raise typer.BadParameter("--data only with --clusters")
        if (convert and (markdown or system or size)) or (deepspeed and not convert):
            raise typer.BadParameter(
                "--convert goes with neither --markdown, --system nor --size; --deepspeed only with --convert"
            )
        try:
            nbytes = None if size is None else parse_size(size)
            page = markdown is not None
            others = None if page else nbytes  # a page has several suites of different sizes
            suites: list[Suite] = []
            if page or not (training or ranks or clusters or convert):
                suites.append(
                    _made(SaveLoadSuite, quick, nbytes=nbytes, shape=shape and shape.value, **common)
                )
            if page or training:
                suites.append(_made(TrainingSuite, quick, nbytes=others, **common, **only_training))
            if page or ranks is not None:
                suites.append(_made(RanksSuite, quick, ranks=_numbers(ranks), nbytes=others, **common))
            if clusters:
                suites.append(_made(ClustersSuite, quick, data=data, rounds=repeat))
            if convert:
                suites.append(_made(ConvertSuite, quick, python=deepspeed, rounds=repeat))
            if plot is not None:
                from everystep.cli.picture import check_suffix

                check_suffix(plot)
            for suite in suites:
                suite.needs()
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        except RuntimeError as error:  # something is not installed
            out.fail(type(error).__name__, str(error))
        _run(out, suites, directory, check, plot, markdown)


def _run(
    out: Session, suites: list[Suite], directory: Path, check: bool, plot: Path | None, markdown: Path | None
) -> None:
    from everystep.cli import picture
    from everystep_study.harness import results, runner
    from everystep_study.report import pages, writers
    from everystep_study.report.plot import draw

    found = []
    try:
        if plot is not None:
            picture.require_matplotlib()
        for suite in suites:
            found.append((suite, runner.run(suite, directory, out.errors, check=check)))
            if markdown is not None:  # after each suite: minutes of measuring are not lost to a later one
                page = pages.benchmarks(found, f"everystep bench --markdown {markdown}")
                markdown.write_text(writers.markdown(page), "utf-8")
    except (MemoryError, RuntimeError) as error:  # a state too large, something not installed
        out.fail(type(error).__name__, str(error))
    for suite, result in found:
        if plot is not None:
            draw([view.chart(result) for view in suite.views(result)], result, plot)
        if out.as_json:
            print(results.to_json(result).decode())
            continue
        out.say(pages.heading(result), style="bold")
        for table in pages.tables(suite, result):
            out.console.print()
            out.tabulate(writers.terminal(table))
        out.console.print()
        for note in pages.notes(suite, result):
            out.say(note, style="dim")
    out.finish(problem=any(pages.has_problem(suite, result) for suite, result in found))


def _made(kind: Any, quick: bool, **options: Any) -> Suite:
    """The suite with the options that were given."""
    usual = kind.quick() if quick else kind()
    suite: Suite = replace(usual, **{name: value for name, value in options.items() if value is not None})
    return suite


PLUGIN = Plugin(
    bench,
    (
        ("everystep bench /scratch --quick", "speed beside the alternatives, small and fast"),
        ("everystep bench /scratch --plot bench.png", "the same with a picture, at 1 GiB"),
        ("everystep bench /scratch --training", "what a checkpoint after every step costs"),
    ),
)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    """Numbers of ranks from ``"1,2,4"``, ascending."""
    if text is None:
        return None
    if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text) is None:
        raise ValueError(f"not numbers of ranks: {text!r}; write them like 1,2,4")
    return tuple(sorted({int(word) for word in text.split(",")}))


def parse_size(text: str) -> int:
    """Bytes from ``"256M"``, ``"1.5GiB"``, ``"4096"``; units are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"not a size: {text!r}; write it like 512M, 1G or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
