"""`integrations.keras` with the real Keras, on its backends: resuming bit for bit, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.processes import peers

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("keras_training.py")
EXAMPLE = peers.PROJECT / "examples" / "keras_training.py"
SECONDS = 900.0
ENVIRONMENTS = {"jax": "keras", "torch": "keras", "tensorflow": "tensorflow"}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return peers.with_everystep(tmp_path / "site")


def run(backend: str, env: dict[str, str], *arguments: Any) -> str:
    return peers.run(
        ENVIRONMENTS[backend], SCRIPT, *arguments, env={**env, "KERAS_BACKEND": backend}, timeout=SECONDS
    )


@pytest.mark.parametrize(
    ("backend", "data"),
    [
        ("jax", "batches"),
        ("tensorflow", "batches"),
        ("torch", "batches"),
        ("jax", "arrays"),
        ("tensorflow", "arrays"),
        ("torch", "arrays"),
        ("jax", "dataset"),
        ("tensorflow", "tf.data"),
        ("jax", "batches+2"),
        ("tensorflow", "batches+2"),
    ],
)
def test_a_resumed_training_ends_with_the_same_bits(
    tmp_path: Path, env: dict[str, str], backend: str, data: str
) -> None:
    # 5 is the end of an epoch. Two at a time, it is 6: Keras counts a batch more.
    kills = ("2", "6", "8") if data.endswith("+2") else ("1", "5", "7", "14")
    output = run(backend, env, "exact", tmp_path, data, *kills)
    whole, *resumed = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert whole["step"] == (18 if data.endswith("+2") else 15), output
    assert len(whole["history"]["loss"]) == 3
    assert resumed == [whole] * len(kills), output


@pytest.mark.parametrize("backend", ENVIRONMENTS)
def test_what_does_not_fit_is_refused(tmp_path: Path, env: dict[str, str], backend: str) -> None:
    assert "faults: ok" in run(backend, env, "faults", tmp_path)


@pytest.mark.parametrize("backend", ENVIRONMENTS)
def test_the_example_passes_the_drill(tmp_path: Path, env: dict[str, str], backend: str) -> None:
    env = {**env, "KERAS_BACKEND": backend}
    output = peers.drill(ENVIRONMENTS[backend], EXAMPLE, tmp_path, env)
    assert "32 checkpoints seen in both, all equal" in output, output
