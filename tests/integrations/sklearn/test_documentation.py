"""The examples of docs/sklearn.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

from everystep.integrations.sklearn.versions import NEWEST, OLDEST

PAGE = Path(__file__).parents[3] / "docs/sklearn.md"


def test_the_examples_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec"), names)
    assert names["model"].t_ == 1001.0


def test_the_page_names_the_supported_versions() -> None:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    assert f"Versions {oldest} to {newest} of scikit-learn" in PAGE.read_text()
    assert (
        f'"scikit-learn>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}"'
        in (PAGE.parents[1] / "pyproject.toml").read_text()
    )
