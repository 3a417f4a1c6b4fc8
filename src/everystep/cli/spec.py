"""``everystep spec check FILE SRC``: which rule of a spec takes each parameter of a foreign checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, Session, session

if TYPE_CHECKING:
    from everystep.universal.spec import Spec
    from everystep.universal.spec_check import SpecCheck

spec = typer.Typer(no_args_is_help=True, help="Layout rules for checkpoints of other systems. Takes --json.")


@spec.callback()
def _group() -> None:
    """Without a callback, typer makes the only command the group itself."""


@spec.command()
def check(
    file: Annotated[Path, typer.Argument(readable=False, metavar="FILE", help="The spec, a TOML file.")],
    source: Annotated[Path, typer.Argument(readable=False, metavar="SRC", help="The checkpoint.")],
    as_json: Json = False,
) -> None:
    """Say which rule takes each parameter, and what does not fit.

    Exit code 1 if a parameter has no rule, two get the same name, or a rule does not fit the shapes.
    """
    with session(as_json) as out:
        from everystep.universal.spec import Spec
        from everystep.universal.spec_check import check_spec

        loaded = Spec.load(file)
        found = check_spec(loaded, source)
        if as_json:
            out.emit(_document(found, loaded))
        else:
            _print(out, found, loaded)
        out.finish(problem=found.problem is not None)


def _document(found: SpecCheck, loaded: Spec) -> dict[str, object]:
    return {
        "kind": found.kind,
        "parameters": [
            {
                "name": line.name,
                "rule": line.number,
                "match": None if line.rule is None else line.rule.match.text,
                "says": None if line.rule is None else str(line.rule),
                "new_name": line.new_name,
            }
            for line in found.parameters
        ],
        "unmatched": list(found.unmatched),
        "unused": list(found.unused(loaded)),
        "problem": found.problem,
    }


def _print(out: Session, found: SpecCheck, loaded: Spec) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    rows = table("parameter", "rule", "pattern", "says", fold=("parameter", "pattern", "says"))
    for line in found.parameters:
        number = "none" if line.number is None else str(line.number)
        pattern, says = ("", "") if line.rule is None else (line.rule.match.text, str(line.rule))
        rows.add_row(words.plain(line.name), number, words.plain(pattern), words.plain(says))
    out.tabulate(rows)
    out.console.print()
    out.say(f"{words.count(len(found.parameters), 'parameter')} of a {found.kind} checkpoint")
    unused = found.unused(loaded)
    if unused:
        out.say(f"rules that take nothing: {', '.join(map(str, unused))}", style="dim")
    if found.problem is None:
        out.say("every parameter has a rule, and the rules fit")
    else:
        out.say(words.plain(found.problem), style="red")
