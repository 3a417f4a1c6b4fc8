"""The typer application: which commands there are, and the options of ``everystep`` itself."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from everystep import __version__
from everystep.cli.completion import completion
from everystep.cli.convert import convert
from everystep.cli.diff import diff
from everystep.cli.doctor import doctor
from everystep.cli.drill import drill
from everystep.cli.errors import BROKEN_PIPE, PROBLEM
from everystep.cli.examples import ExampleCommand, ExampleGroup
from everystep.cli.export import export
from everystep.cli.ls import ls
from everystep.cli.plugins import PANEL, CommandGroup
from everystep.cli.prune import prune
from everystep.cli.session import close_output
from everystep.cli.shelf import shelf
from everystep.cli.show import show
from everystep.cli.spec import spec
from everystep.cli.stats import stats
from everystep.cli.streams import prepare_streams
from everystep.cli.verify import verify
from everystep.cli.view import view

app = typer.Typer(
    name="everystep",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=CommandGroup,
)

_LOOK = "Look"
_CHANGE = "Take out and clear away"
_TRAINING = "Your training"

for _panel, _commands in (
    (_LOOK, (ls, show, stats, view, verify, diff)),
    (_CHANGE, (export, convert, prune)),
    (PANEL, (doctor, completion)),
):
    for _command in _commands:
        app.command(rich_help_panel=_panel, cls=ExampleCommand)(_command)

for _name, _group, _panel in (("spec", spec, _LOOK), ("shelf", shelf, _LOOK)):
    for _below in _group.registered_commands:
        _below.cls = ExampleCommand
    app.add_typer(_group, name=_name, rich_help_panel=_panel, cls=ExampleGroup)

# Everything after the first word of the drilled command belongs to it, even if it looks like an option.
app.command(
    rich_help_panel=_TRAINING, cls=ExampleCommand, context_settings={"allow_interspersed_args": False}
)(drill)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"everystep {__version__}")
        raise typer.Exit


@app.callback()
def everystep(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Training state: durable after every step, at the speed of the disk.

    A PATH is a checkpoint, or a run, which stands for its newest checkpoint. RUN@30 is the one of step 30,
    RUN@latest the newest, RUN@-2 the one before it. Inside a run, @30 is enough.

    Commands that report something take --json. Exit code 0: fine; 1: a problem was found, or two checkpoints
    differ; 2: wrong usage.
    """


@app.command("help", hidden=True)
def show_help(
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", show_default=False)] = None,
) -> None:
    """Show the help of a command, or of everystep."""
    app([*(command or []), "--help"], prog_name="everystep")


def run() -> None:
    """Runs a command. If its output cannot be written, it prints one line and exits with a code."""
    _require_streams()
    try:
        try:
            app(prog_name="everystep")
        finally:
            sys.stdout.flush()  # now: a failure when the interpreter ends would show a traceback
    except BrokenPipeError:
        close_output()
        raise SystemExit(BROKEN_PIPE) from None
    except OSError as error:
        close_output()
        print(f"everystep: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        raise SystemExit(PROBLEM) from None


def _require_streams() -> None:
    """Python has None for a stream that the parent process closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- for as long as the process lives
    if sys.stdout is None:
        print("everystep: standard output is closed", file=sys.stderr)
        raise SystemExit(1)
    prepare_streams()
