"""cli: the command ``holdfast``. People's side of everything below.

A module per command (`ls`, `show`, `verify`, `diff`, `stats`, `export`, `prune`, `drill`, `doctor`, `bench`,
`demo`) holds its options and what it prints. `session` is what they share: consoles, ``--json``, progress,
errors, exit codes; `words` puts numbers into words. The work that is more than printing has rooms of its own:
`listing` (what a run's directory holds), `windows` (leaves in bounded memory), `comparing` and `numbers`
(diff), `summing` (stats), `exporting`, `machine` (doctor).

Modules of commands import what they need when they are called, so that ``holdfast --help`` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """The entry point. Exits with 0: fine, 1: a problem was found, 2: wrong usage, 130: interrupted."""
    try:
        from holdfast.cli.app import run

        run()
    except KeyboardInterrupt:
        # While modules were loading, or output was being flushed; a command at work handles it itself.
        raise SystemExit(130) from None
