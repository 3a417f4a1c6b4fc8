"""Integrations refuse URLs: the calls of `support.processes.path_calls`, with the real frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import peers
from support.processes.path_calls import CALLS, FRAMEWORKS, framework_of

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("refused_urls.py")
ENVIRONMENT = {"accelerate": "transformers", "lightning": "transformers"}


@pytest.mark.parametrize("framework", sorted({framework_of(name) for name in CALLS} & set(FRAMEWORKS)))
def test_an_integration_refuses_urls_and_makes_nothing(tmp_path: Path, framework: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    env = {**peers.with_everystep(tmp_path / "site"), "HF_HUB_OFFLINE": "1", "KERAS_BACKEND": "torch"}
    output = peers.run(ENVIRONMENT.get(framework, framework), SCRIPT, framework, cwd=here, env=env)
    calls = [name for name in CALLS if framework_of(name) == framework]
    assert [line for line in output.splitlines() if line.startswith("refused: ")] == [
        f"refused: {name}" for name in calls
    ]
