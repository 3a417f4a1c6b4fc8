"""The suite of conversions: verdicts from made-up results; with DeepSpeed, a small one from end to end."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from everystep_study.harness.results import Result, Row, from_json
from everystep_study.suites.convert import DEEPSPEED, ConvertSuite
from support.processes.command import command
from support.study.bench_results import result, row, text_of

MIB, GB = 1 << 20, 1e9


def made_up(
    *,
    ours: float = 2.0,
    universal: float = 4.0,
    straight: float = 1.0,
    large: float = 4.0,
    peak: float = 100.0,
    written: float = GB,
) -> Result:
    """DeepSpeed takes 10 seconds."""
    rows: list[Row] = []
    for group in ("ZeRO-1", "ZeRO-3"):
        disk = {"written_nbytes": written, "kept_nbytes": GB, "process_nbytes": peak * MIB}
        rows.append(row("convert", "everystep", group, seconds=ours, inside_seconds=1.0, **disk))
        rows.append(
            row("convert", "everystep-universal", group, seconds=universal, inside_seconds=3.0, **disk)
        )
        theirs = {**disk, "process_nbytes": 900.0 * MIB}
        rows.append(row("convert", "deepspeed", group, seconds=10.0, inside_seconds=6.0, **theirs))
    rows += [row("restore", "everystep", seconds=straight), row("restore", "converted", seconds=2.0)]
    for case, seconds, nbytes in (("67", 1.0, GB), ("268", large, 4 * GB)):
        rows.append(
            row("sizes", case, inside_seconds=seconds, source_nbytes=nbytes, process_nbytes=1.0 * MIB)
        )
    # Made-up warm-up rounds have ten times the readings; of memory, they count.
    return result(*(msgspec.structs.replace(r, samples=r.samples[1:]) for r in rows))


def verdicts(found: Result) -> dict[str, str]:
    return {bar.key: bar.verdict for bar in ConvertSuite().bars(found)}


def test_every_promise_is_kept_by_good_numbers() -> None:
    assert set(verdicts(made_up()).values()) == {"PASS"}


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"ours": 2.6}, ["ZeRO-1-everystep", "ZeRO-3-everystep"]),
        ({"universal": 5.1}, ["ZeRO-1-everystep-universal", "ZeRO-3-everystep-universal"]),
        ({"straight": 2.1}, ["restore"]),
        ({"large": 5.2}, ["linear"]),
        ({"peak": 513.0}, ["memory"]),
        ({"written": 2 * GB}, ["ZeRO-1-once", "ZeRO-3-once"]),
    ],
)
def test_each_promise_can_be_broken(change: dict[str, float], broken: list[str]) -> None:
    found = verdicts(made_up(**change))
    assert [key for key, verdict in found.items() if verdict == "FAIL"] == broken


def test_the_report_says_what_is_compared() -> None:
    text = text_of(ConvertSuite(), made_up())
    assert "ZeRO-1: the everystep 2.00 2.00-2.00 1.00 1.00 1.00 100 5.00" in text
    assert "syncs nothing" in text


def test_without_deepspeed_the_message_says_what_to_do(tmp_path: Path) -> None:
    outcome = command("bench", tmp_path, "--convert", "--deepspeed", tmp_path / "python")
    assert outcome.code == 1
    assert "make peers" in outcome.err
    assert command("bench", tmp_path, "--deepspeed", tmp_path / "python").code == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.peers
@pytest.mark.timeout(1800)
def test_a_small_benchmark_from_end_to_end(tmp_path: Path) -> None:
    python = Path(__file__).parents[2] / DEEPSPEED
    options = ("--convert", "--quick", "--rounds", "1", "--json", "--deepspeed", python)
    outcome = command("bench", tmp_path, *options)
    assert outcome.code == 0, outcome.err + outcome.out
    found = from_json(outcome.out.encode())
    assert {(row.status, row.reason) for row in found.rows} == {("measured", "")}
    assert [row.section for row in found.rows] == ["convert"] * 6 + ["restore"] * 2 + ["sizes"] * 2
