"""The names that DeepSpeed gives to files are written down in one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import everystep
from everystep.universal.deepspeed.names import LATEST, LATEST_UNIVERSAL, OPTIMIZER_STATE, model_file

ROOT = Path(everystep.__file__).parent
OWNER = ROOT / "universal" / "deepspeed" / "names.py"
NAMES = re.compile(
    rf"zero_pp_rank|expp_rank|\w_states\.pt|_states\\\.pt|{LATEST_UNIVERSAL}$|{re.escape(OPTIMIZER_STATE)}$"
)


def strings(source: str) -> Iterator[str]:
    """The texts in code that are not documentation, without the messages for people."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    for node in constants:
        if isinstance(node.value, str) and " " not in node.value and id(node) not in documentation:
            yield node.value


def test_only_one_module_knows_the_names_of_files() -> None:
    found = {
        path.relative_to(ROOT): text
        for path in ROOT.rglob("*.py")
        if path != OWNER
        for text in strings(path.read_text())
        if NAMES.search(text)
    }
    assert not found
    assert any(NAMES.search(text) for text in strings(OWNER.read_text()))


def test_the_newest_tag_is_named_in_one_place() -> None:
    folders = [ROOT / "universal" / "deepspeed", ROOT / "integrations" / "deepspeed"]
    modules = [path for folder in folders for path in folder.rglob("*.py") if path != OWNER]
    assert len(modules) > 10
    assert not [path.name for path in modules if LATEST in strings(path.read_text())]


def test_model_files_are_named_as_deepspeed_does() -> None:
    assert model_file(3) == "mp_rank_03_model_states.pt"
    assert model_file(12, zero3=True) == "zero_pp_rank_0_mp_rank_12_model_states.pt"
