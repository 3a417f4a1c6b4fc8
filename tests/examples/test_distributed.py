"""The examples for several ranks: they run, they survive a kill, they resume on another number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import everystep
from support.worlds.torchrun_examples import kill, read_until, run, started

pytest.importorskip("torch.distributed")

COMPLETED = re.compile(r"(\d+) steps were already completed")
STEP = re.compile(r"step (\d+): loss ([\d.]+), durable up to step (\d+|None)")


def completed_of(lines: list[str]) -> int:
    return next(int(found[1]) for line in lines if (found := COMPLETED.search(line)))


def steps_of(lines: list[str]) -> dict[int, tuple[float, str]]:
    """Loss and durable step of every step that was printed."""
    return {int(found[1]): (float(found[2]), found[3]) for line in lines if (found := STEP.search(line))}


def kill_after(step: int, ranks: int, example: str, *arguments: object) -> dict[int, tuple[float, str]]:
    with started(ranks, example, *arguments) as process:
        lines = read_until(process, lambda line: f"step {step}: " in line)
        kill(process)
    assert completed_of(lines) == 0
    return steps_of(lines)


@pytest.mark.timeout(600)
def test_ddp_killed_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "ddp"
    before = kill_after(6, 2, "ddp.py", path, "--steps", 10_000)
    assert sorted(before) == [1, 2, 3, 4, 5, 6]
    durable = int(before[6][1])
    assert durable >= 5, "a crash costs one step"

    # What was durable is there; the step whose save was under way may be; more may have ended since.
    with everystep.open(path) as checkpoint:
        left = checkpoint.step
    assert durable <= left
    last = left + 6
    lines = run(1, "ddp.py", path, "--steps", last)
    assert completed_of(lines) == left
    after = steps_of(lines)
    assert sorted(after) == list(range(left + 1, last + 1))
    assert after[last][0] < before[1][0]
    with everystep.open(path) as checkpoint:
        assert checkpoint.step == last


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fsdp2_with_tensor_parallelism_killed_resumes_on_other_meshes(tmp_path: Path) -> None:
    path = tmp_path / "fsdp2"
    before = kill_after(4, 4, "fsdp2_tp.py", path, "--steps", 10_000)
    durable = int(before[4][1])
    assert durable >= 3
    first = run(4, "fsdp2_tp.py", path, "--steps", 20, "--tp", 1)
    assert completed_of(first) >= durable
    second = run(2, "fsdp2_tp.py", path, "--steps", 22, "--tp", 2)
    assert completed_of(second) == 20
    third = run(3, "fsdp2_tp.py", path, "--steps", 24, "--tp", 1)
    assert completed_of(third) == 22
    assert steps_of(third)[24][0] < before[1][0]
    with everystep.open(path) as checkpoint:
        assert checkpoint.step == 24


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_code_on_the_page_about_many_ranks_runs(tmp_path: Path) -> None:
    for volume in ("nvme0/ckpt", "nvme1/ckpt"):
        (tmp_path / volume).mkdir(parents=True)
    here = Path(__file__)
    lines = run(
        3,
        str(here.parents[1] / "support" / "processes" / "documentation_page.py"),
        here.parents[2] / "docs/distributed.md",
        tmp_path,
    )
    ran = [line for line in lines if line.endswith(" ran")]
    assert ran[-1] == f"block {len(ran) - 1} of {len(ran)} ran"
    assert len(ran) >= 6
