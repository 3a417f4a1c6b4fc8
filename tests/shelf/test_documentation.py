"""The examples of docs/shelf.md run, and its table and its grammar are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everystep.engine import NativeShelf, empty_shelf, xxh3_64

DOCS = Path(__file__).parents[2] / "docs"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "shelf.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "shelf.md", "exec"), names)


def test_the_crash_table_says_that_no_shelf_was_torn() -> None:
    rows = [line.split(" | ") for line in (DOCS / "shelf.md").read_text().splitlines() if "crash" not in line]
    shelves = [row for row in rows if row[0] == "| shelf" and len(row) == 7]
    assert len(shelves) == 2
    assert all(row[5:] == ["0", "0 |"] for row in shelves)


def test_an_empty_file_is_what_the_grammar_says(tmp_path: Path) -> None:
    made = empty_shelf(7, 1 << 20)
    assert len(made) == 3 * 4096
    assert made[:8] == b"esshelf\n"
    assert [int.from_bytes(made[at:end], "little") for at, end in ((8, 12), (12, 16), (16, 24))] == [
        1,
        4096,
        7,
    ]
    assert int.from_bytes(made[56:64], "little") == xxh3_64(made[:56])
    root = made[8192:]
    assert root[:8] == b"esroot1\n"
    numbers = [int.from_bytes(root[at : at + 8], "little") for at in range(8, 48, 8)]
    assert numbers == [7, 1, 1 << 20, 12288, 1]
    assert int.from_bytes(root[4088:], "little") == xxh3_64(root[:4088])
    path = tmp_path / "a.shelf"
    path.write_bytes(made)
    assert NativeShelf(str(path), False, "").names() == []
