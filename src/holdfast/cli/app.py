"""The typer application: which commands there are, and the options of ``holdfast`` itself."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli.bench import bench
from holdfast.cli.completion import completion
from holdfast.cli.convert import convert
from holdfast.cli.diff import diff
from holdfast.cli.doctor import doctor
from holdfast.cli.drill import drill
from holdfast.cli.errors import BROKEN_PIPE, PROBLEM
from holdfast.cli.examples import ExampleCommand, ExampleGroup
from holdfast.cli.export import export
from holdfast.cli.ls import ls
from holdfast.cli.prune import prune
from holdfast.cli.session import close_output
from holdfast.cli.shelf import shelf
from holdfast.cli.show import show
from holdfast.cli.spec import spec
from holdfast.cli.stats import stats
from holdfast.cli.streams import prepare_streams
from holdfast.cli.study import study
from holdfast.cli.verify import verify
from holdfast.cli.view import view

app = typer.Typer(
    name="holdfast",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=ExampleGroup,
)

_LOOK = "Look"
_CHANGE = "Take out and clear away"
_MACHINE = "This machine"
_TRAINING = "Your training"

for _panel, _commands in (
    (_LOOK, (ls, show, stats, view, verify, diff)),
    (_CHANGE, (export, convert, prune)),
    (_MACHINE, (doctor, bench, completion)),
):
    for _command in _commands:
        app.command(rich_help_panel=_panel, cls=ExampleCommand)(_command)

for _name, _group, _panel in (("spec", spec, _LOOK), ("shelf", shelf, _LOOK), ("study", study, _MACHINE)):
    for _below in _group.registered_commands:
        _below.cls = ExampleCommand
    app.add_typer(_group, name=_name, rich_help_panel=_panel, cls=ExampleGroup)

# What follows the first word of the drilled command is that command's, also where it looks like an option.
app.command(
    rich_help_panel=_TRAINING, cls=ExampleCommand, context_settings={"allow_interspersed_args": False}
)(drill)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Training state: durable after every step, at the speed of the disk.

    A PATH is a checkpoint, or a run, which stands for its newest checkpoint. RUN@30 is that of step 30,
    RUN@latest the newest, RUN@-2 the one before it; inside of a run, @30 will do.

    Commands that report something take --json. Exit code 0: fine; 1: a problem was found, or two checkpoints
    differ; 2: wrong usage.
    """


@app.command("help", hidden=True)
def show_help(
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", show_default=False)] = None,
) -> None:
    """Show the help of a command, or of holdfast."""
    app([*(command or []), "--help"], prog_name="holdfast")


def run() -> None:
    """Runs a command. If its output cannot be written, that is one line and an exit code."""
    _require_streams()
    try:
        try:
            app(prog_name="holdfast")
        finally:
            sys.stdout.flush()  # now: what fails when the interpreter ends shows a traceback
    except BrokenPipeError:
        close_output()
        raise SystemExit(BROKEN_PIPE) from None
    except OSError as error:
        close_output()
        print(f"holdfast: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        raise SystemExit(PROBLEM) from None


def _require_streams() -> None:
    """Python has None for a stream that the parent process closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- for as long as the process lives
    if sys.stdout is None:
        print("holdfast: standard output is closed", file=sys.stderr)
        raise SystemExit(1)
    prepare_streams()
