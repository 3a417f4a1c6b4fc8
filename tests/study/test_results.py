"""Medians, ratios and their intervals; what is shown of them; when a promise counts as broken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everystep_study.harness import results
from everystep_study.harness.results import Row, ratio_interval
from everystep_study.report import pages, plot, writers
from everystep_study.report.elements import NOTHING, TIMES
from support.study.bench_results import ScriptedSuite, result, row, text_of


def test_the_warm_up_round_counts_for_memory_only() -> None:
    found = row("save", "a", seconds=(1.0, 2.0, 3.0))
    assert found.spread() == results.Spread(2.0, 1.0, 3.0)
    assert found.peak("seconds") == 10.0


def test_ratios_are_of_medians_and_intervals_of_rounds() -> None:
    ours, theirs = row("save", "a", seconds=(1.0, 1.1, 1.2)), row("save", "b", seconds=(2.0, 2.2, 2.4))
    assert results.ratio(theirs, ours) == results.faster(ours, theirs) == pytest.approx(2.0)
    found = ratio_interval(theirs, ours)
    assert found is not None
    # Rounds are drawn together: a machine that is slower in one round is so for both.
    assert (found.low, found.high, found.rounds) == (pytest.approx(2.0), pytest.approx(2.0), 3)
    steady = ratio_interval(theirs, row("save", "c", seconds=1.0))
    assert steady is not None
    assert (steady.low, steady.high) == (2.0, 2.4)
    assert ratio_interval(theirs, ours) == found, "the same result gives the same interval"


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [((0.5, 0.5, 0.6), "PASS"), ((0.9, 1.0, 1.2), "within noise"), ((1.1, 1.2, 1.3), "FAIL")],
)
def test_only_an_interval_wholly_on_the_wrong_side_fails(seconds: tuple[float, ...], verdict: str) -> None:
    measured = results.interval(row("save", "a", seconds=seconds))
    assert results.judge("k", "p", "<=", 1.0, "s", measured).verdict == verdict
    opposite = {"PASS": "FAIL", "FAIL": "PASS"}.get(verdict, verdict)
    assert results.judge("k", "p", ">=", 1.0, "s", measured).verdict == opposite


def test_few_rounds_judge_nothing_and_exact_values_need_none() -> None:
    two = results.judge("k", "p", "<=", 1.0, "s", results.interval(row("save", "a", seconds=(5.0, 5.0))))
    assert (two.verdict, two.detail) == ("not measured", "2 rounds; 3 or more are needed")
    assert results.judge("k", "p", "<=", 256.0, "MiB", results.exactly(300.0)).verdict == "FAIL"
    assert results.judge("k", "p", "<=", 256.0, "MiB", None, "why").verdict == "not measured"


FAILED = Row("save", "", "dcp", "the dcp", "failed", "OSError: gone")


def test_the_report_has_every_row_its_reason_and_its_verdicts() -> None:
    bar = results.judge(
        "k", "a promise", "<=", 1.0, "x", results.interval(row("", "a", seconds=(0.9, 1.0, 1.2)))
    )
    found = result(row("save", "everystep", seconds=(1.0, 2.0, 3.0)), FAILED, others=0.3)
    found = msgspec.structs.replace(found, bars=(bar,))
    text = text_of(ScriptedSuite(), found)
    for words in (
        "the everystep 2.00 1.00-3.00 1.00",
        f"the dcp {NOTHING} failed",
        "the dcp: failed. OSError: gone",
        "a promise within noise",
        f"1.00{TIMES} (0.90{TIMES} to 1.20{TIMES})",
        "Others used 30 % of the CPUs",
    ):
        assert words in text
    assert "promises" not in text_of(ScriptedSuite(), result(FAILED)), "only with --check"
    assert results.from_json(results.to_json(found)) == found


def test_a_failure_of_everystep_itself_is_a_problem() -> None:
    ours = msgspec.structs.replace(FAILED, case="everystep")
    broken = results.judge("k", "p", "<=", 1.0, "x", results.exactly(2.0))
    suite = ScriptedSuite()
    assert not pages.has_problem(suite, result(FAILED))
    assert pages.has_problem(suite, result(ours))
    assert pages.has_problem(suite, msgspec.structs.replace(result(), bars=(broken,)))


def test_the_page_has_the_tables_the_machine_and_how_to_make_it_again() -> None:
    found = result(row("save", "everystep", seconds=2.0), row("save", "torch", seconds=4.0), FAILED)
    page = writers.markdown(pages.benchmarks([(ScriptedSuite(), found)], "everystep bench --markdown x.md"))
    for words in (
        "`everystep bench --markdown x.md`",
        "2 CPUs, ext4",
        "## Scripted",
        "| | s | range | half |\n|---|---:|---:|---:|",
        "| **the everystep** | 2.00 | 2.00-2.00 | 1.00 |",
        "| the torch | 4.00 |",
        "the dcp: failed. OSError: gone",
    ):
        assert words in page


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_names_every_row_and_draws_what_they_are_compared_with(
    suffix: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"x.{suffix}"
    found = result(row("save", "raw", seconds=1.0), row("save", "everystep", seconds=2.0), FAILED)
    plot.draw([view.chart(found) for view in ScriptedSuite().views(found)], found, path)
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
    else:
        for words in (b"the everystep", b"the dcp", b"failed", b"the raw"):
            assert words in data
    with pytest.raises(ValueError, match=r"\.png or \.svg, not as 'x\.gif'"):
        plot.draw([view.chart(found) for view in ScriptedSuite().views(found)], found, tmp_path / "x.gif")
