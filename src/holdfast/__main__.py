"""``python -m holdfast``: the command `holdfast`."""

from __future__ import annotations

from holdfast.cli import main

main()
