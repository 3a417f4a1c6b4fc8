"""Writes the crash table of docs/shelf.md: ``python tests/shelf/crash_table.py``.

For every scheme the same random histories, and crashes at every point of them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "shelf.md"
BEGIN, END = "<!-- crash table -->\n", "<!-- end of crash table -->\n"
SEEDS = range(8)


def table() -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.shelves.shelf_crashes import merged
    from support.shelves.shelf_schemes import rows, scratch

    lines = [
        "| scheme | medium | crash states | recovered latest | recovered previous | torn, noticed "
        "| torn, unnoticed |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    directory = scratch(Path("."))
    try:
        for title, medium, run in rows(transactions=10, per_point=16):
            found = merged(run(directory, seed) for seed in SEEDS)
            counts = found.states, found.latest, found.previous, found.noticed, found.unnoticed
            lines.append(f"| {title} | {medium} | " + " | ".join(f"{count:,}" for count in counts) + " |")
            print(lines[-1], flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    made = table()
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + made + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
