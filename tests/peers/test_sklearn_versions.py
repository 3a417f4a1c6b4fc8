"""The tests of `everystep.integrations.sklearn`, with the oldest and the newest supported scikit-learn."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import everystep
from support.processes import peers

PROJECT = Path(__file__).resolve().parents[2]
VERSIONS = {"sklearn-oldest": "1.3.", "sklearn-newest": "1.9."}


@pytest.mark.peers
@pytest.mark.parametrize("name", VERSIONS)
def test_fits_resume_with_this_scikit_learn(name: str, tmp_path: Path) -> None:
    package = tmp_path / "everystep"
    package.mkdir()
    native = Path(str(importlib.import_module("everystep._native").__file__))
    for entry in [*Path(everystep.__file__).parent.iterdir(), native]:
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    version = peers.run(name, "-c", "import sklearn; print(sklearn.__version__)")
    assert version.startswith(VERSIONS[name])
    output = peers.run(
        name,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/integrations/sklearn"),
        cwd=PROJECT,
        env={"PYTHONPATH": str(tmp_path)},
        timeout=900,
    )
    assert " passed" in output
    assert "skipped" not in output
