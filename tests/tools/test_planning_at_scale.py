"""The simulation of many ranks, at a size that takes seconds: what must grow does, what must not does not."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import planning_at_scale as scale
import pytest
from planning_at_scale import LAYOUTS, Layout, ScaleSuite

from everystep_study.harness import runner
from everystep_study.harness.results import Result, Row
from support.study.bench_results import quiet, result, row, text_of


@pytest.fixture(scope="module", autouse=True)
def _collect_no_garbage() -> Iterator[None]:
    """With torch loaded a collection takes a third of a second, and there is one before every measurement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)
        yield


def simulate(
    folder: Path,
    worlds: tuple[int, ...],
    leaves: int,
    rounds: int = 2,
    layouts: tuple[Layout, ...] = LAYOUTS,
) -> Result:
    found = runner.run(ScaleSuite(worlds, leaves, layouts, rounds), folder, quiet(), check=True)
    assert {(r.status, r.reason) for r in found.rows} == {("measured", "")}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return simulate(tmp_path_factory.mktemp("scale"), (16, 64), 100)


def value(found: Result, layout: str, world: int, name: str) -> float:
    rows = [r for r in found.rows if r.title == layout and r.median("world") == world]
    fullest: Row = max(rows, key=lambda r: r.median("leaves") or 0)
    return fullest.median(name) or math.nan


def test_every_layout_is_simulated_in_every_world(found: Result) -> None:
    assert len(found.rows) == len(LAYOUTS) * 3
    nbytes = sum(math.prod(shape) * (2 if dtype == "BF16" else 4) for _, dtype, shape in scale.model(100))
    for layout in LAYOUTS:
        for world in (16, 64):
            assert value(found, layout, world, "reshard_world") == world * 3 // 4
            assert value(found, layout, world, "state_nbytes") == nbytes
    text = text_of(ScaleSuite(), found)
    assert "hsdp x tp, 64 ranks" in text


def test_shares_are_even(found: Result) -> None:
    assert all(1 <= (r.peak("load_ratio") or 0) < 1.01 for r in found.rows)


def test_a_rank_describes_only_its_own_leaves(found: Result) -> None:
    for layout in LAYOUTS:
        assert value(found, layout, 64, "part_nbytes") <= value(found, layout, 16, "part_nbytes")
        assert value(found, layout, 64, "fragments") <= value(found, layout, 16, "fragments")
    # Replicated state is cut up among more ranks, so each of them has less to describe.
    assert value(found, "ddp", 64, "fragments") < value(found, "ddp", 16, "fragments")


def test_the_root_grows_by_a_line_per_rank(tmp_path: Path) -> None:
    many = simulate(tmp_path, (128, 256), 20, rounds=1, layouts=("ddp",))
    grown, own = (
        value(many, "ddp", 256, name) - value(many, "ddp", 128, name)
        for name in ("root_nbytes", "part_nbytes")
    )
    assert 0 < (grown - own) / 128 < 100  # the coordinator's own part is in the root


def test_a_resuming_rank_opens_few_parts(found: Result) -> None:
    for layout in ("fsdp", "hsdp x tp"):
        assert value(found, layout, 64, "parts") <= 16
    # Eight ranks of a node share the reading of what is replicated.
    assert value(found, "ddp", 64, "parts") <= 64 / 8 + 2


@pytest.mark.parametrize(("seconds", "verdict"), [(0.9, "PASS"), (1.1, "FAIL")])
def test_a_commit_that_takes_too_long_breaks_a_promise(seconds: float, verdict: str) -> None:
    slow = result(row("plan", "x", "ddp", seconds=1.0, world=1024.0, commit_seconds=seconds))
    (bar,) = ScaleSuite().bars(slow)
    assert bar.verdict == verdict


def test_worlds_without_ranks_or_leaves_are_errors() -> None:
    for suite in (ScaleSuite(worlds=()), ScaleSuite(worlds=(0,)), ScaleSuite(leaves=1)):
        with pytest.raises(ValueError, match="at least 1 rank"):
            suite.needs()


def test_the_tool_prints_its_tables_and_its_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--ranks", "4,2", "--leaves", "20", "--rounds", "1", "--check"]) == 0
    assert "ddp, 4 ranks" in capsys.readouterr().out
