"""The table tells all and fits a terminal; the JSON says the same and can be read back."""

from __future__ import annotations

import io
import json

import msgspec
from rich.console import Console

from holdfast.study import bars, report, results
from holdfast.study.results import BenchResult, Row
from support.bench_results import TITLES, result, rows


def judged(given: list[Row] | None = None, **options: object) -> BenchResult:
    made = result(given, **options)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, bars=bars.judge(made))


def printed(given: BenchResult, width: int = 80) -> str:
    out = io.StringIO()
    report.show(given, Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def test_every_system_has_its_row_in_both_tables() -> None:
    lines = printed(judged()).splitlines()
    for title in TITLES.values():
        assert sum(line.startswith(f"{title} ") for line in lines) == 2


def test_numbers_of_a_row_are_those_of_its_summary() -> None:
    line = next(line for line in printed(judged()).splitlines() if line.startswith("torch.save "))
    assert line.split() == ["torch.save", "0.62", "0.59-0.64", "0.31", "0.08", "40", "3.10"]


def test_tables_fit_80_columns_without_cutting_words() -> None:
    absent = Row(results.DCP, "torch DCP", "save", "not installed", "pip install torch")
    text = printed(judged(rows(save_dcp=absent)))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_not_installed_or_failed_is_listed_with_its_reason() -> None:
    absent = Row(results.DCP, "torch DCP", "save", "not installed", "pip install torch")
    broken = Row(results.SAVEZ, "np.savez", "load", "failed", "OSError: no space left")
    text = printed(judged(rows(save_dcp=absent, load_savez=broken)))
    assert "torch DCP: not installed. pip install torch" in text
    assert "np.savez: failed. OSError: no space left" in text
    assert text.count("not installed") == 3  # the row, its reason, and the bar that needs it


def test_temperature_stands_over_the_loads() -> None:
    assert "load, cold page cache (drop_caches)" in printed(judged())
    warm = printed(judged(temperature="warm"))
    assert "load, warm page cache" in warm
    assert "could not be emptied" in warm


def test_bars_say_promise_measurement_and_verdict() -> None:
    text = printed(judged(import_seconds=0.2))
    line = next(line for line in text.splitlines() if "import holdfast" in line)
    assert line.split() == ["FAIL", "import", "holdfast", "≤", "150", "ms", "200", "ms"]
    line = next(line for line in text.splitlines() if "of the raw direct write" in line)
    assert line.startswith("PASS")
    assert line.split()[-3:] == ["≥", "0.90×", "0.96×"]  # noqa: RUF001


def test_a_machine_that_was_busy_is_told() -> None:
    assert "busy" not in printed(judged(load_before=1.9))
    assert "Others kept 2.1 of 8 CPUs busy" in printed(judged(load_before=2.1))


def test_problems_are_told() -> None:
    given = msgspec.structs.replace(judged(), problems=("small saves failed: OSError: gone",))
    assert "small saves failed: OSError: gone" in printed(given)


def test_json_reads_back_equal() -> None:
    given = judged()
    assert report.from_json(report.to_json(given)) == given


def test_json_has_the_documented_members() -> None:
    document = json.loads(report.to_json(judged()))
    assert document["format"] == "holdfast-bench/1"
    assert set(document) == set(BenchResult.__struct_fields__)
    first = document["rows"][0]
    assert set(first) == {"system", "title", "operation", "status", "reason", "samples", "summary"}
    assert set(first["summary"]) == {
        "gb_per_second",
        "cpu_seconds_per_gb",
        "peak_growth_nbytes",
        "ratio_to_raw",
        "holdfast_is_faster_by",
    }
    assert set(first["samples"][0]) == {
        "round",
        "position",
        "seconds",
        "cpu_seconds",
        "peak_growth_nbytes",
        "temperature",
    }
    assert {bar["verdict"] for bar in document["bars"]} == {"PASS"}
    assert len(document["rows"]) == 2 * len(TITLES)
