"""The examples in the documentation of the code run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import tempfile
from pathlib import Path

import pytest

import everystep
import everystep_study

MODULES = sorted(
    ".".join((package.__name__, *file.relative_to(source).with_suffix("").parts))
    for package in (everystep, everystep_study)
    if package.__file__ and (source := Path(package.__file__).parent)
    for file in source.rglob("*.py")
    if file.name != "__init__.py" and ">>>" in file.read_text("utf-8")
)


def test_the_documented_calls_have_examples() -> None:
    assert {
        "everystep.store.api",
        "everystep.checkpointer.checkpointer",
        "everystep.checkpointer.keep",
    } <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_do_what_they_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("everystep.integrations.data.") and name != "everystep.integrations.data.sampler":
        pytest.importorskip("torch")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = doctest.testmod(importlib.import_module(name), verbose=False)
    assert result.attempted > 0
    assert result.failed == 0
