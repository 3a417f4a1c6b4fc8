"""``python -m holdfast.cli``."""

from __future__ import annotations

from holdfast.cli import main

main()
