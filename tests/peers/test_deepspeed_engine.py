"""`everystep.integrations.deepspeed` with the real DeepSpeed: what its users do, and resuming bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes import peers

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).with_name("deepspeed_engine_training.py")
EXAMPLE = peers.PROJECT / "examples" / "deepspeed_training.py"
SECONDS = 700.0
CASES = [
    *(f"{stage}-{kind}-{how}" for stage in (0, 1) for kind in ("fp32", "bf16") for how in ("use", "state")),
    *("1-fp32-overlap", "1-fp16-state", "2-fp32-overlap", "2-fp32-state", "2-fp16-use"),
    *("3-fp32-use", "3-fp32-overlap", "3-fp32-state", "3-bf16-state"),
]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return peers.with_everystep(tmp_path / "site")


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, env: dict[str, str], ranks: int) -> None:
    cases = CASES if ranks == 2 else ["1-fp32-use", "2-fp32-state", "3-fp32-overlap"]
    if not peers.deepspeed_has_fp16():
        cases = [case for case in cases if "fp16" not in case]

    def train(part: str, *, dies: bool) -> list[dict[str, Any]]:
        arguments = ["exact", tmp_path, part, *cases]
        said = peers.run("deepspeed", SCRIPT, *arguments, ranks=ranks, env=env, dies=dies, timeout=SECONDS)
        return sorted(reports(said), key=lambda report: (report["case"], report["rank"]))

    whole = train("first", dies=True)
    assert [(report["case"], report["rank"]) for report in whole] == sorted(
        (case, rank) for case in cases for rank in range(ranks)
    )
    assert train("again", dies=False) == whole
    if ranks == 2:  # now, what two ranks have saved is loaded by one
        few = ["1-fp32-use", "3-fp32-use", "2-fp32-state", "3-fp32-state"]
        said = peers.run("deepspeed", SCRIPT, "other", tmp_path, *few, env=env, timeout=SECONDS)
        assert "other: ok" in said, said


def test_a_kill_inside_of_a_save_leaves_the_one_before_or_the_new_one(
    tmp_path: Path, env: dict[str, str]
) -> None:
    said = reports(peers.run("deepspeed", SCRIPT, "kills", tmp_path, env=env, timeout=SECONDS))
    second, third = said[0]["digest"], said[1]["digest"]
    found = [report for report in said if "nth" in report]
    assert [report["next"] for report in found if report["nth"] == 0] == [3, 3], said  # not killed
    killed = [report["next"] for report in found if report["nth"]]
    assert len(killed) == 6, said
    assert {2} <= set(killed) <= {2, 3}, said
    assert [report["digest"] for report in found] == [
        {2: second, 3: third}[report["next"]] for report in found
    ]


def test_damage_other_files_and_what_does_not_fit(tmp_path: Path, env: dict[str, str]) -> None:
    assert "own: ok" in peers.run("deepspeed", SCRIPT, "own", tmp_path / "own", env=env, timeout=SECONDS)


def test_other_layouts_are_saved_and_read_as_by_deepspeed(tmp_path: Path, env: dict[str, str]) -> None:
    output = peers.run("deepspeed", SCRIPT, "layouts", tmp_path, ranks=2, env=env, timeout=SECONDS)
    assert "layouts: ok" in output, output


def test_the_example_passes_the_drill(tmp_path: Path, env: dict[str, str]) -> None:
    """The drill runs in our own environment: that of DeepSpeed does not have what commands need."""
    command = [
        sys.executable,
        "-m",
        "everystep.cli",
        "drill",
        "--times",
        "2",
        "--workdir",
        tmp_path / "drill",
    ]
    call = f"import subprocess, sys; sys.exit(subprocess.call({[*map(str, command), '--']} + sys.argv[1:]))"
    python = peers.interpreter("deepspeed")
    output = peers.run("deepspeed", "-c", call, python, EXAMPLE, env=env, cwd=tmp_path, timeout=900)
    assert "32 checkpoints seen in both, all equal" in output, output
