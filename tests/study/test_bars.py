"""Each bar passes on its promise, fails below it, and is judged only where it was made for."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.study import bars, results
from holdfast.study.results import Bar, BenchResult, Operation, Row
from support.bench_results import LOAD_SPEEDS, SAVE_SPEEDS, result, row, rows


def bar(of: BenchResult, key: str) -> Bar:
    return next(b for b in bars.judge(of) if b.key == key)


def test_a_good_run_passes_everything() -> None:
    for shape in ("gpt2", "few-large", "many-small"):
        assert {b.verdict for b in bars.judge(result(shape=shape))} == {"PASS"}


RATIOS = [
    ("save", results.RAW, 0.90),
    ("save", results.TORCH, 2.5),
    ("save", results.DCP, 2.5),
    ("save", results.SAFETENSORS, 1.4),
    ("save", results.TORCH_NO_CRC, 1.4),
    ("load", results.RAW, 0.85),
    ("load", results.TORCH, 1.3),
]


@pytest.mark.parametrize(("operation", "system", "limit"), RATIOS)
@pytest.mark.parametrize(("factor", "verdict"), [(1.001, "PASS"), (0.999, "FAIL")])
def test_speed_bars_turn_at_their_limit(
    operation: Operation, system: str, limit: float, factor: float, verdict: str
) -> None:
    ours = (SAVE_SPEEDS if operation == "save" else LOAD_SPEEDS)[results.HOLDFAST]
    theirs = row(system, operation, ours / (limit * factor))
    given = rows(**{f"{operation}_{system.replace('-', '_')}": theirs})
    judged = bar(result(given), f"{operation}-vs-{system}")
    assert (judged.verdict, judged.limit) == (verdict, limit)
    assert judged.measured == pytest.approx(limit * factor)


@pytest.mark.parametrize(("factor", "verdict"), [(1.001, "PASS"), (0.999, "FAIL")])
def test_many_small_turns_at_the_speed_of_safetensors(factor: float, verdict: str) -> None:
    given = rows(save_safetensors=row(results.SAFETENSORS, "save", SAVE_SPEEDS[results.HOLDFAST] / factor))
    assert bar(result(given, shape="many-small"), "save-vs-safetensors").verdict == verdict


@pytest.mark.parametrize(("cpu", "verdict"), [(0.119, "PASS"), (0.121, "FAIL")])
def test_cpu_bar_turns_at_its_limit(cpu: float, verdict: str) -> None:
    given = rows(save_holdfast=row(results.HOLDFAST, "save", 1.92, cpu_seconds_per_gb=cpu))
    assert bar(result(given), "save-cpu").verdict == verdict


@pytest.mark.parametrize("system", [results.HOLDFAST, results.RECYCLED])
@pytest.mark.parametrize(("peak", "verdict"), [(256, "PASS"), (257, "FAIL")])
def test_memory_bar_counts_the_worst_round_of_either_way_to_save(
    system: str, peak: int, verdict: str
) -> None:
    worst = row(system, "save", 1.92, peak_mib=peak)  # which `row` puts into the warm-up round
    given = rows(**{f"save_{system.replace('-', '_')}": worst})
    assert bar(result(given), "save-memory").verdict == verdict


@pytest.mark.parametrize(("seconds", "verdict"), [(0.149, "PASS"), (0.151, "FAIL")])
def test_import_bar_turns_at_its_limit(seconds: float, verdict: str) -> None:
    assert bar(result(import_seconds=seconds), "import-time").verdict == verdict


def test_import_that_pulls_in_torch_fails_and_names_it() -> None:
    judged = bar(result(heavy=("torch",)), "import-light")
    assert (judged.verdict, judged.detail) == ("FAIL", "torch")


@pytest.mark.parametrize(("ratio", "verdict"), [(1.499, "PASS"), (1.501, "FAIL")])
def test_latency_bar_turns_at_its_limit(ratio: float, verdict: str) -> None:
    assert bar(result(latency_ratio=ratio), "latency").verdict == verdict


def test_bars_for_large_tensors_are_not_held_against_many_small() -> None:
    keys = {b.key for b in bars.judge(result(shape="many-small"))}
    assert keys == {"save-vs-safetensors", "save-memory", "import-time", "import-light", "latency"}


def test_warm_loads_are_not_judged() -> None:
    judged = {b.key: b for b in bars.judge(result(temperature="warm"))}
    for key in ("load-vs-raw", "load-vs-torch"):
        assert judged[key].verdict == "not measured"
        assert "page cache" in judged[key].detail
    assert judged["save-vs-raw"].verdict == "PASS"


@pytest.mark.parametrize("operation", ["save", "load"])
@pytest.mark.parametrize(("ratio", "verdict"), [(1.09, "PASS"), (1.11, "not measured")])
def test_beating_the_device_proves_nothing(operation: Operation, ratio: float, verdict: str) -> None:
    ours = (SAVE_SPEEDS if operation == "save" else LOAD_SPEEDS)[results.HOLDFAST]
    given = rows(**{f"{operation}_raw_huge": row(results.RAW_HUGE, operation, ours / ratio)})
    judged = bar(result(given), f"{operation}-vs-raw")
    assert judged.verdict == verdict
    assert ("not possible" in judged.detail) == (verdict != "PASS")


def test_beating_a_peer_by_far_is_possible() -> None:
    given = rows(save_torch=row(results.TORCH, "save", 0.1))
    assert bar(result(given), "save-vs-torch").verdict == "PASS"


def test_rounds_that_disagree_about_a_verdict_are_told() -> None:
    steady = row(results.TORCH, "save", SAVE_SPEEDS[results.HOLDFAST] / 2.6)
    middle = msgspec.structs.replace(steady.samples[2])
    level = tuple(msgspec.structs.replace(middle, round=i) for i in range(4))
    # Holdfast's own rounds run from 0.95 to 1.04 of its median, so against a level peer from 2.47 to 2.70.
    judged = bar(result(rows(save_torch=msgspec.structs.replace(steady, samples=level))), "save-vs-torch")
    assert (judged.verdict, judged.detail) == ("PASS", "rounds disagree: 2.47 to 2.70")
    assert bar(result(), "save-vs-torch").detail == ""


def test_a_bar_whose_peer_is_missing_is_not_measured_and_says_why() -> None:
    absent = Row(results.DCP, "torch DCP", "save", "not installed", "pip install torch")
    judged = bar(result(rows(save_dcp=absent)), "save-vs-dcp")
    assert (judged.verdict, judged.measured) == ("not measured", None)
    assert judged.detail == "torch DCP: not installed"


def test_a_bar_whose_peer_was_not_asked_for_says_so() -> None:
    given = [r for r in rows() if r.system != results.TORCH]
    assert bar(result(given), "save-vs-torch").detail == "left out of this run"


def test_nothing_passes_when_nothing_was_measured() -> None:
    empty = msgspec.structs.replace(result([]), latency=None, import_cost=None)
    for shape in ("gpt2", "many-small"):
        judged = bars.judge(msgspec.structs.replace(empty, shape=shape))
        assert {b.verdict for b in judged} == {"not measured"}
