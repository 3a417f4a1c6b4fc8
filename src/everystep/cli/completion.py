"""``everystep completion SHELL``: the script by which a shell completes commands, options and ``RUN@STEP``.

The scripts call ``everystep completion --words LINE``, which prints one proposal per line. For paths it
proposes nothing, so that the shell completes files as usual. After an @ it lists the steps.
"""

from __future__ import annotations

import os
import typing
from enum import Enum
from typing import Annotated, Any

import typer

from everystep.cli.plugins import CommandGroup

_SCRIPTS = {
    # Bash ends a word at an @, so only what follows it is replaced.
    "bash": r"""_everystep() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##*[[:space:]]}"
    local IFS=$'\n'
    COMPREPLY=($(everystep completion --words "$line" 2>/dev/null))
    if [[ $word == *@* && $COMP_WORDBREAKS == *@* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%@*}@"}")
    fi
}
complete -o bashdefault -o default -o nosort -F _everystep everystep
""",
    "zsh": r"""#compdef everystep
_everystep() {
    local -a found
    found=("${(@f)$(everystep completion --words "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then
        compadd -V everystep -- "${found[@]}"
    else
        _files
    fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _everystep "$@"
else
    compdef _everystep everystep
fi
""",
    "fish": r"""function __everystep_complete
    everystep completion --words (commandline --cut-at-cursor | string collect) 2>/dev/null
end
complete --command everystep --keep-order --arguments '(__everystep_complete)'
""",
}


class Shell(str, Enum):
    """The shells that have a script."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    context: typer.Context,
    shell: Annotated[Shell | None, typer.Argument(metavar="bash|zsh|fish", show_default=False)] = None,
    words: Annotated[str | None, typer.Option("--words", hidden=True)] = None,
) -> None:
    """Print the script by which a shell completes commands, options, and steps after RUN@."""
    if words is not None:
        for found in proposals(context.find_root().command, words):
            print(found)
    elif shell is not None:
        print(_SCRIPTS[shell.value], end="")
    else:
        raise typer.BadParameter("name your shell: bash, zsh or fish", param_hint="SHELL")


def proposals(root: Any, line: str) -> list[str]:
    """Proposals for the last word of a command line."""
    *before, last = [*line.split(), ""] if line[-1:].isspace() or not line else line.split()
    if before[1:2] == ["help"]:
        del before[1]
    if isinstance(root, CommandGroup):
        root.add_plugins()
    command: Any = root
    for word in before[1:]:
        if word == "--":
            return []
        command = getattr(command, "commands", {}).get(word, command)
    options = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    if last.startswith("-"):
        found = [name for name in (*options, "--help") if name.startswith("--")]
    elif before and (option := _option(command, before[-1])) is not None:
        found = _choices(command, option)
    elif hasattr(command, "commands"):
        found = [name for name, inner in command.commands.items() if not inner.hidden]
    elif "@" in last:
        found = _references(last)
    else:
        arguments = [parameter for parameter in command.params if not parameter.opts[0].startswith("-")]
        found = _choices(command, arguments[0]) if arguments else []
    return [name for name in found if name.startswith(last)]


def _option(command: Any, name: str) -> Any:
    """The option of that name, if a value follows it."""
    return next((found for found in command.params if name in found.opts and not found.is_flag), None)


def _choices(command: Any, parameter: Any) -> list[str]:
    """The values that a parameter may have; none if it may be anything."""
    if parameter.opts[0] in _KINDS and command.name == "convert":
        return _KINDS[parameter.opts[0]]()
    hint = typing.get_type_hints(command.callback).get(parameter.name)
    kinds = [
        kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and issubclass(kind, Enum)
    ]
    return [str(member.value) for kind in kinds for member in kind]


def _sources() -> list[str]:
    from everystep import universal

    return ["auto", "everystep", *universal.kinds()]


def _targets() -> list[str]:
    from everystep import universal

    return universal.target_kinds()


_KINDS = {"--kind": _sources, "--to": _targets}
"""Of `convert`: the systems that can be read, and those that can be written."""


def _references(word: str) -> list[str]:
    """The steps of a run, newest first, as names to read them by."""
    from everystep.errors import EverystepError
    from everystep.store import list_steps

    run = word.rpartition("@")[0]
    where = run if run.endswith("/") else os.path.expanduser(run) or "."
    try:
        steps = list_steps(where)
    except (EverystepError, OSError):
        return []
    return [f"{run}@{name}" for name in ("latest", *reversed(steps))] if steps else []
