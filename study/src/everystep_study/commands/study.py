"""``everystep study run | report | setup``: what checkpoints cost in every framework. Only the options."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from everystep.cli.plugins import Plugin
from everystep.cli.session import Json, session

study = typer.Typer(
    no_args_is_help=True,
    help="What checkpoints cost in each framework: measure, and read the report.",
    rich_markup_mode="markdown",
)

Directory = Annotated[Path, typer.Argument(readable=False, metavar="DIR", help="Of `study run`.")]


@study.command()
def run(
    suite: Annotated[
        list[str] | None,
        typer.Option("--suite", help="cost, formats, scale, determinism, bitflips or all (the default)."),
    ] = None,
    framework: Annotated[
        str | None, typer.Option("--frameworks", metavar="NAME,...", help="Such as torch,jax. Default: all.")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            metavar="NAME,...",
            help="mlp, resnet50, vgg16, gpt2. Default: all; with --quick, the smallest.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small models and few rounds: five minutes.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.1, help="End after about so long, with fewer rounds.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Counted rounds. Default: 3.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of models, data and damage.")] = 0,
    out: Annotated[
        Path,
        typer.Option(
            "--out", readable=False, metavar="DIR", help="On the device to measure; results go there, too."
        ),
    ] = Path("everystep-study"),
    as_json: Json = False,
) -> None:
    """Measure, and write the raw results to a directory.

    An interrupted study is continued by the same command. Each framework runs in a process of its own; one
    that is missing, crashes or hangs costs its rows, not the study.
    """
    with session(as_json) as console:
        from everystep_study import campaign, frameworks

        try:
            options = campaign.Options(
                campaign.suite_names(suite or ()),
                tuple(frameworks.choose(framework)),
                campaign.model_names(models),
                quick,
                seed,
                rounds,
                minutes,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        found = campaign.run(
            out, options, console.errors, lambda said: console.errors.print(said, soft_wrap=True)
        )
        if as_json:
            console.emit({"directory": str(out), "parts": len(found.entries)})
        else:
            console.say(f"{len(found.entries)} parts are in {out}. The report: everystep study report {out}")
        console.finish(problem=False)


@study.command()
def report(
    directory: Directory,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", readable=False, metavar="DIR", help="Where the report goes. Default: into DIR."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a study: report.html, one page that needs no network, and report.md."""
    with session(as_json) as console:
        from everystep_study.harness.results_directory import ResultsDirectory
        from everystep_study.report import pages, writers

        page, folder = pages.study(ResultsDirectory.read(directory)), out or directory
        folder.mkdir(parents=True, exist_ok=True)
        web, summary = folder / "report.html", folder / "report.md"
        web.write_text(writers.html(page), "utf-8")
        summary.write_text(writers.markdown(page), "utf-8")
        if as_json:
            console.emit({"html": str(web), "markdown": str(summary)})
        else:
            console.say(f"{web}\n{summary}")
        console.finish(problem=False)


@study.command()
def setup(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A framework, or an environment of the table.")],
    as_json: Json = False,
) -> None:
    """Make the virtual environment of a framework, with pinned packages, in a cache folder."""
    with session(as_json) as console:
        from everystep_study import environments, frameworks

        entry = frameworks.FRAMEWORKS.get(name)
        environment = name if entry is None else entry.environment
        if environment is None:
            console.say(f"{name} runs in this environment: pip install 'everystep[{name}]'")
            console.finish(problem=False)
            return
        if environment not in environments.ENVIRONMENTS:
            known = sorted({*frameworks.FRAMEWORKS, *environments.ENVIRONMENTS})
            raise typer.BadParameter(f"there is no {name!r}; there are {', '.join(known)}")
        try:
            python = environments.build(
                environment, environments.cache_folder(), lambda said: console.errors.print(said)
            )
        except subprocess.CalledProcessError as error:
            console.fail("SetupFailed", f"the environment could not be built: {error}")
        if as_json:
            console.emit({"python": str(python)})
        else:
            console.say(str(python))
        console.finish(problem=False)


PLUGIN = Plugin(
    study,
    (
        ("everystep study run --quick --out study", "small models, five minutes; call it again for more"),
        ("everystep study report study", "study/report.html and study/report.md"),
        ("everystep study setup tensorflow", "an environment for one more framework"),
    ),
)
