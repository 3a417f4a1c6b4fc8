"""cli: the command ``everystep``. It parses options and prints; `everystep.inspect` and others do the work.

A module per command (`ls`, `show`, `verify`, `diff`, `stats`, `export`, `prune`, `spec`, `drill`,
`doctor`) holds its options and prints its result. They share `session` (consoles, ``--json``, progress),
`errors` (how an error becomes a message and an exit code), `words` (numbers as people read them) and
`streams` (encodings that lack a character).
`stats_plot` draws what `stats` prints, with `picture`; `examples` is what ``--help`` ends with; `completion`
is for shells; `plugins` finds the commands of other distributions.

Modules of commands import what they need when they are called, so that ``everystep --help`` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """The entry point. Exits with 0: fine, 1: a problem was found, 2: wrong usage, 130: interrupted."""
    try:
        from everystep.cli.app import run

        run()
    except KeyboardInterrupt:
        # While modules were loading, or output was being flushed; a command at work handles it itself.
        raise SystemExit(130) from None
