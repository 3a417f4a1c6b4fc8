"""``python -m everystep.cli``."""

from __future__ import annotations

from everystep.cli import main

main()
