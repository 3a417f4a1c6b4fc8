"""The examples of docs/universal.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from everystep import universal
from support.processes.command import command

pytest.importorskip("torch")
PAGE = Path(__file__).parents[2] / "docs/universal.md"


@pytest.mark.filterwarnings("ignore")
def test_the_examples_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec"), names)


def test_the_lists_of_targets_are_complete() -> None:
    shown = command("convert", "--help").out
    for kind in universal.target_kinds():
        assert re.search(rf"\b{kind}\b", shown)
        assert f"``{kind}``" in (universal.convert.__doc__ or "")
        assert f"`{kind}`" in PAGE.read_text()
