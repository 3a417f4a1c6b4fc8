"""Commands of other distributions: entry points of the group ``everystep.commands``.

Each of them names a `Plugin`, under the name of its command. A plugin may use `session` and `picture` of this
package, as our own commands do. Looking for entry points takes 20 ms, so it happens only when the command
line names a command that is not ours, and for ``--help`` and completion.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from everystep.cli.examples import EXAMPLES, ExampleCommand, ExampleGroup

GROUP = "everystep.commands"
PANEL = "This machine"
WRONG_USAGE = 2
_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
HOMES = {"bench": "everystep-study", "study": "everystep-study"}
"""Commands that our documents mention, and the distributions that have them."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A command, or a group of commands, with the examples that its help ends with."""

    command: Callable[..., None] | typer.Typer
    examples: tuple[tuple[str, str], ...] = ()
    panel: str = PANEL


class CommandGroup(ExampleGroup):
    """``everystep`` itself: our commands, then those of other distributions."""

    def add_plugins(self) -> None:
        for name, command in typer.main.get_group(installed()).commands.items():
            self.commands.setdefault(name, command)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self.add_plugins()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        self.add_plugins()
        return super().list_commands(ctx)


@functools.cache
def installed() -> typer.Typer:
    """The commands of other distributions. If one is missing, its command says what to install."""
    from importlib.metadata import entry_points

    app = typer.Typer()
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in sorted({*found, *HOMES}):
        if name not in found:
            _add_refusal(app, name, f"{name} is part of another package: pip install {HOMES[name]}")
            continue
        try:
            plugin = found[name].load()
        except Exception as error:  # one broken distribution must not break the other commands
            _add_refusal(app, name, f"{name} cannot be loaded: {type(error).__name__}: {error}")
        else:
            _add(app, name, plugin)
    return app


def _add(app: typer.Typer, name: str, plugin: Plugin) -> None:
    EXAMPLES[name] = plugin.examples
    if isinstance(plugin.command, typer.Typer):
        for below in plugin.command.registered_commands:
            below.cls = ExampleCommand
        app.add_typer(plugin.command, name=name, rich_help_panel=plugin.panel, cls=ExampleGroup)
    else:
        app.command(name, rich_help_panel=plugin.panel, cls=ExampleCommand)(plugin.command)


def _add_refusal(app: typer.Typer, name: str, why: str) -> None:
    def refuse() -> None:
        print(f"everystep: {why}", file=sys.stderr)
        raise typer.Exit(WRONG_USAGE)

    app.command(name, rich_help_panel=PANEL, help=f"{why}.", context_settings=_ANYTHING)(refuse)
