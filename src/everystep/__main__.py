"""``python -m everystep``: the command `everystep`."""

from __future__ import annotations

from everystep.cli import main

main()
