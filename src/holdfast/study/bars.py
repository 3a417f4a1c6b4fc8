"""The promises about speed and cost, held against one run. Each is judged only where it was made for.

Measuring is done elsewhere; here are only the numbers promised and the comparison.
"""

from __future__ import annotations

from typing import Literal

from holdfast.study import results
from holdfast.study.results import Bar, BenchResult, Operation, Row, Verdict, ratios_by_round, speed_ratio
from holdfast.study.states import Shape

MIB = 1 << 20

SAVE_TO_RAW = 0.90
SAVE_TO_TORCH = 2.5
SAVE_TO_DCP = 2.5
SAVE_TO_SAFETENSORS = 1.4
SAVE_TO_TORCH_NO_CRC = 1.4
LOAD_TO_RAW = 0.85
LOAD_TO_TORCH = 1.3
CPU_SECONDS_PER_GB = 0.12
MANY_SMALL_TO_SAFETENSORS = 1.0
PEAK_GROWTH_MIB = 256.0
IMPORT_SECONDS = 0.150
LATENCY_TO_HAND = 1.5

CREDIBLE_TO_RAW = 1.10
"""Nothing that writes a fresh file is faster than the device at its best, from huge pages. A ratio to that
beyond this says that the two did not meet the same device (others used it meanwhile), and proves nothing."""

_LARGE: tuple[Shape, ...] = ("few-large", "gpt2")


def judge(result: BenchResult) -> tuple[Bar, ...]:
    """Every bar that applies to the shape of this run."""
    bars: list[Bar] = []
    if result.shape in _LARGE:
        bars += [
            _faster(result, "save", results.RAW, SAVE_TO_RAW, "save, of the raw direct write"),
            _faster(result, "save", results.TORCH, SAVE_TO_TORCH, "save, against torch.save + fsync"),
            _faster(result, "save", results.DCP, SAVE_TO_DCP, "save, against torch DCP + fsync"),
            _faster(
                result,
                "save",
                results.SAFETENSORS,
                SAVE_TO_SAFETENSORS,
                "save, against safetensors + fsync",
            ),
            _faster(
                result,
                "save",
                results.TORCH_NO_CRC,
                SAVE_TO_TORCH_NO_CRC,
                "save, against torch.save, no CRC + fsync",
            ),
            _cpu(result),
            _faster(result, "load", results.RAW, LOAD_TO_RAW, "cold load, of the raw direct read"),
            _faster(result, "load", results.TORCH, LOAD_TO_TORCH, "cold load, against torch.load"),
        ]
    else:
        bars.append(
            _faster(
                result,
                "save",
                results.SAFETENSORS,
                MANY_SMALL_TO_SAFETENSORS,
                "many small tensors, against safetensors + fsync",
            )
        )
    bars.append(_memory(result))
    bars += _import(result)
    bars.append(_latency(result))
    return tuple(bars)


def make_bar(
    key: str,
    promise: str,
    sense: Literal[">=", "<="],
    limit: float,
    measured: float | None,
    unit: str,
    detail: str = "",
) -> Bar:
    verdict: Verdict
    if measured is None:
        verdict = "not measured"
    else:
        verdict = "PASS" if (measured >= limit if sense == ">=" else measured <= limit) else "FAIL"
    return Bar(key, promise, sense, limit, measured, unit, verdict, detail)


def _faster(result: BenchResult, operation: Operation, system: str, limit: float, promise: str) -> Bar:
    ours, theirs = result.row(results.HOLDFAST, operation), result.row(system, operation)
    ratio = speed_ratio(ours, theirs)
    detail = "" if ratio is not None else _why_not(ours) or _why_not(theirs)
    rounds = ratios_by_round(ours, theirs)
    if ratio is not None and min(rounds) < limit <= max(rounds):
        detail = f"rounds disagree: {min(rounds):.2f} to {max(rounds):.2f}"
    beyond = speed_ratio(ours, result.row(results.RAW_HUGE, operation)) if system == results.RAW else None
    if beyond is not None and beyond > CREDIBLE_TO_RAW:
        detail = f"{beyond:.2f} times raw, huge pages: not possible; measure again, quietly, with more rounds"
        ratio = None
    if operation == "load" and result.temperature == "warm":
        # The promise is about a restart; against the page cache it was never made.
        ratio, detail = None, "the page cache could not be emptied"
    return make_bar(f"{operation}-vs-{system}", promise, ">=", limit, ratio, "x", detail)


def _cpu(result: BenchResult) -> Bar:
    row = result.row(results.HOLDFAST, "save")
    spread = row.summary.cpu_seconds_per_gb if row is not None and row.summary is not None else None
    measured = None if spread is None else spread.median
    return make_bar(
        "save-cpu",
        "CPU of a save, checksums on",
        "<=",
        CPU_SECONDS_PER_GB,
        measured,
        "s/GB",
        "" if measured is not None else _why_not(row),
    )


def _memory(result: BenchResult) -> Bar:
    ours = [result.row(system, "save") for system in (results.HOLDFAST, results.RECYCLED)]
    growths = [
        row.summary.peak_growth_nbytes
        for row in ours
        if row is not None and row.summary is not None and row.summary.peak_growth_nbytes is not None
    ]
    # Both ways of saving must keep to it; the worst round of the worse one counts.
    measured = max(growths) / MIB if growths else None
    detail = "" if measured is not None else _why_not(ours[0]) or "this kernel does not tell peak memory"
    return make_bar(
        "save-memory", "growth of peak memory in a save", "<=", PEAK_GROWTH_MIB, measured, "MiB", detail
    )


def _import(result: BenchResult) -> tuple[Bar, Bar]:
    cost = result.import_cost
    seconds = None if cost is None else cost.import_seconds.median
    detail = "" if cost is None else f"ready to save after {cost.ready_seconds.median * 1000:.0f} ms"
    heavy = None if cost is None else float(len(cost.heavy_modules))
    return (
        make_bar(
            "import-time",
            "import holdfast",
            "<=",
            IMPORT_SECONDS * 1000,
            None if seconds is None else seconds * 1000,
            "ms",
            detail,
        ),
        make_bar(
            "import-light",
            "frameworks that this pulls in",
            "<=",
            0.0,
            heavy,
            "",
            "" if cost is None else ", ".join(cost.heavy_modules),
        ),
    )


def _latency(result: BenchResult) -> Bar:
    taken = result.latency
    promise = "save of 64 KiB, against doing it by hand"
    if taken is None:
        return make_bar("latency", promise, "<=", LATENCY_TO_HAND, None, "x")
    hand = taken.by_hand.median
    detail = (
        f"ms: by hand {hand * 1000:.2f}, save {taken.save.median * 1000:.2f}, "
        f"Checkpointer {taken.checkpointer.median * 1000:.2f}"
    )
    return make_bar("latency", promise, "<=", LATENCY_TO_HAND, taken.save.median / hand, "x", detail)


def _why_not(row: Row | None) -> str:
    if row is None:
        return "left out of this run"
    return f"{row.title}: {row.status}" if row.status != "measured" else ""
