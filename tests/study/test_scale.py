"""The simulation of many ranks, at a size that takes seconds: what must grow does, what must not does not."""

from __future__ import annotations

import io
import math

import msgspec
import pytest
from rich.console import Console

from holdfast.study import scale
from holdfast.study.scale import simulate
from holdfast.study.scale_report import Case, Layout, growth, pairs


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return scale.run((16, 64), 100, samples=2)


def pick(cases: list[Case], layout: Layout, world: int) -> Case:
    return max((c for c in cases if (c.layout, c.world) == (layout, world)), key=lambda case: case.leaves)


def test_every_layout_is_simulated_in_every_world(cases: list[Case]) -> None:
    assert len(cases) == len(scale.LAYOUTS) * 3
    for layout in scale.LAYOUTS:
        for world in (16, 64):
            case = pick(cases, layout, world)
            assert case.reshard_world == world * 3 // 4
            assert case.leaves <= 100
            assert case.state_nbytes == sum(
                math.prod(shape) * (2 if dtype == "BF16" else 4) for _, dtype, shape in scale.model(100)
            )


def test_shares_are_even(cases: list[Case]) -> None:
    assert all(1 <= case.load_ratio < 1.01 for case in cases)


def test_a_rank_describes_its_own_leaves_and_nobody_elses(cases: list[Case]) -> None:
    for layout in scale.LAYOUTS:
        small, large = pick(cases, layout, 16), pick(cases, layout, 64)
        assert large.part_nbytes <= small.part_nbytes
        assert large.fragments <= small.fragments <= 2 * small.leaves
    # Replicated state is cut up among more ranks, so each of them has less to describe.
    assert pick(cases, "ddp", 64).fragments < pick(cases, "ddp", 16).fragments


def test_the_root_grows_by_a_line_per_rank_whatever_they_wrote() -> None:
    few, many = simulate("ddp", 512, 20, samples=1), simulate("ddp", 1024, 20, samples=1)
    own = few.part_nbytes - many.part_nbytes  # the coordinator's own part is in the root
    assert 0 < (many.root_nbytes - few.root_nbytes + own) / 512 < 100


def test_a_resuming_rank_opens_few_parts(cases: list[Case]) -> None:
    for layout in ("fsdp", "hsdp x tp"):
        assert pick(cases, layout, 64).reshard_parts <= 16
    # Eight ranks of a node share the reading of what is replicated.
    assert pick(cases, "ddp", 64).reshard_parts <= 64 / 8 + 2


def test_growth_is_measured_against_linear(cases: list[Case]) -> None:
    before = cases[0]
    after = msgspec.structs.replace(before, world=before.world * 8, root_nbytes=before.root_nbytes * 8)
    assert growth(before, after, lambda case: case.root_nbytes) == pytest.approx(1)
    assert growth(before, after, lambda case: case.part_nbytes) == pytest.approx(0)
    assert growth(before, after, lambda case: case.all_ranks_seconds) == pytest.approx(1)
    for first, second in pairs(cases):
        assert first.layout == second.layout
        assert (first.world < second.world) != (first.leaves < second.leaves)
    assert len(pairs(cases)) == 2 * len(scale.LAYOUTS)


def test_the_table_says_what_was_found(cases: list[Case]) -> None:
    text = io.StringIO()
    limit = msgspec.structs.replace(cases[0], world=1024, commit_seconds=1.5)
    scale.show([*cases, limit], Console(file=text, width=220))
    for words in ("hsdp x tp", "growth (1 = linear", "FAIL: ddp, 1,024 ranks"):
        assert words in text.getvalue()


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "2", "4", "--leaves", "6", "--layout", "fsdp", "--samples", "1", "--json"]
    assert scale.main(arguments) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=list[Case])
    assert {case.world for case in found} == {2, 4}
    with pytest.raises(SystemExit):
        scale.main(["--leaves", "1"])


@pytest.mark.parametrize(("seconds", "code"), [(0.9, 0), (1.1, 1)])
def test_the_command_fails_when_a_commit_takes_too_long(
    cases: list[Case],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    code: int,
) -> None:
    found = [msgspec.structs.replace(cases[0], world=1024, commit_seconds=seconds)]
    monkeypatch.setattr(scale, "run", lambda *arguments: found)
    assert scale.main([]) == code
    assert ("FAIL: ddp, 1,024 ranks" in capsys.readouterr().out) == bool(code)
