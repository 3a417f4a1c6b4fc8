"""cli: the command ``everystep``. It parses options and prints; `everystep.inspect` and others do the work.

| module | what it owns |
|---|---|
| `ls`, `show`, `stats`, `view`, `verify`, `diff` | commands that look: their options, and what they print |
| `export`, `convert`, `prune`, `shelf`, `spec`, `drill`, `doctor` | the other commands |
| `app` | which commands there are, and the options of ``everystep`` itself |
| `session` | what commands share: consoles, ``--json``, progress, tables |
| `errors` | how an error becomes a message and an exit code |
| `words` | numbers, times and names as people read them |
| `streams` | output in encodings that lack a character |
| `stats_plot`, `picture` | the picture of ``stats --plot``; what all pictures share |
| `examples` | the examples at the end of ``--help`` |
| `completion` | the scripts by which shells complete a command line |
| `plugins` | the commands of other distributions |
| `__main__` | ``python -m everystep.cli`` |

Modules of commands import what they need when they are called, so that ``everystep --help`` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """The entry point. Exits with 0: fine, 1: a problem was found, 2: wrong usage, 130: interrupted."""
    try:
        from everystep.cli.app import run

        run()
    except KeyboardInterrupt:
        # While modules are loading, or output is being flushed. A running command handles it itself.
        raise SystemExit(130) from None
