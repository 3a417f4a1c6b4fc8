"""`integrations.jax` with the real JAX, Flax and Optax: devices, processes, and resuming bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.processes import peers

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("jax_training.py")
EXAMPLE = peers.PROJECT / "examples" / "jax_training.py"
SECONDS = 390.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return peers.with_everystep(tmp_path / "site")


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


class Processes:
    """Real processes of one `jax.distributed` world, each with its share of eight devices."""

    def __init__(self, folder: Path, env: dict[str, str], world: int) -> None:
        self._folder = folder
        self._env = env
        self._world = world

    def start(self, *arguments: str | Path) -> list[subprocess.Popen[str]]:
        port = peers.free_port()
        started = []
        for process in range(self._world):
            own = {"JAX_PROCESSES": f"{process} {self._world} {port}"} if self._world > 1 else {}
            own["JAX_DEVICES"] = str(8 // self._world)
            started.append(
                subprocess.Popen(
                    [peers.interpreter("jax"), SCRIPT, *arguments],
                    env={**os.environ, **self._env, **own},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return started

    def run(self, *arguments: str | Path) -> list[str]:
        """The outputs of all processes, which must succeed."""
        started = self.start(*arguments)
        outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
        assert [process.returncode for process in started] == [0] * self._world, "\n".join(outputs)
        return outputs


def test_trees_on_eight_two_and_four_devices(tmp_path: Path, env: dict[str, str]) -> None:
    assert "trees: ok" in peers.run("jax", SCRIPT, "trees", tmp_path, env=env, timeout=SECONDS)


def test_states_without_pytrees_may_hold_arrays_of_jax(tmp_path: Path, env: dict[str, str]) -> None:
    assert "plain: ok" in peers.run("jax", SCRIPT, "plain", tmp_path, env=env, timeout=SECONDS)


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, env: dict[str, str]) -> None:
    kills = (1, 4, 7)
    output = peers.run("jax", SCRIPT, "exact", tmp_path, *map(str, kills), env=env, timeout=SECONDS)
    whole, *resumed = reports(output)
    assert (whole["step"], whole["first"]) == (12, 0), output
    assert len(resumed) == len(kills), output
    for kill, found in zip(kills, resumed, strict=True):
        # What was durable when the process died: the step just saved, or the one before.
        assert found["first"] in ((kill,) if kill % 2 else (kill - 1, kill)), output
        assert {**found, "first": 0} == whole, output


@pytest.mark.timeout(1200)
def test_processes_write_what_they_own_and_any_number_reads_it(tmp_path: Path, env: dict[str, str]) -> None:
    two, one, four = (Processes(tmp_path, env, world) for world in (2, 1, 4))
    assert all("spread: ok" in output for output in two.run("save", tmp_path))
    assert all("spread: ok" in output for output in one.run("load", tmp_path))
    assert all("spread: ok" in output for output in four.run("load", tmp_path))


@pytest.mark.timeout(1200)
def test_a_lost_process_changes_no_bit(tmp_path: Path, env: dict[str, str]) -> None:
    two = Processes(tmp_path, env, 2)

    def digests(outputs: list[str]) -> list[tuple[int, str]]:
        return [(report["step"], report["digest"]) for output in outputs for report in reports(output)]

    whole = two.run("train", tmp_path / "whole", "8")
    first, last = two.start("train", tmp_path / "killed", "8", "5")
    output = last.communicate(timeout=SECONDS)[0]
    assert last.returncode == -signal.SIGKILL, output
    first.kill()  # it waits for the lost one; a launcher would end it
    first.communicate()
    resumed = two.run("train", tmp_path / "killed", "8")
    assert all(report["first"] == 5 for output in resumed for report in reports(output)), resumed
    assert digests(resumed) == digests(whole)
    # One process with all eight devices goes on where two were.
    (alone,) = Processes(tmp_path, env, 1).run("train", tmp_path / "killed", "8")
    assert reports(alone)[0]["first"] == 8


@pytest.mark.timeout(1200)
def test_the_example_passes_the_drill(tmp_path: Path, env: dict[str, str]) -> None:
    output = peers.drill("jax", EXAMPLE, tmp_path, env)
    assert "32 checkpoints seen in both, all equal" in output, output
