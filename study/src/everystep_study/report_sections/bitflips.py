"""The report on the suite ``bitflips``: by bit, whether training and loaders noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everystep_study.frameworks.orders.bitflips import NOTICED_LOSS
from everystep_study.report_parts import (
    NOTHING,
    Item,
    Number,
    Source,
    Strip,
    SuiteReport,
    Table,
    is_ours,
    small,
    table,
    whole,
)
from everystep_study.results import Row
from everystep_study.suites.bitflips import BITS, STEPS

_BITS_BELOW = ("0, least of the fraction", "23 to 30: exponent, 31: sign")


def _items(source: Source) -> Iterator[Item]:
    if trained := source.rows("training"):
        yield _trained_strip(source, trained)
        yield _trained(source, trained)
    if loaded := source.rows("loader"):
        yield _loaded_strip(source, loaded)
        yield _loaded(source, loaded)


def _trained_strip(source: Source, rows: Sequence[Row]) -> Strip:
    def square(row: Row, bit: int) -> tuple[str, Number | None]:
        worst = source.number(row, f"worst_loss_change, bit {bit}", small, "high")
        broken = source.number(row, f"broken_step, bit {bit}", whole, "high")
        noticed = source.number(row, f"noticed_step, bit {bit}", whole, "high")
        tone = "bad" if broken and broken.value else "p1" if noticed and noticed.value else "none"
        return tone, worst

    made = tuple((row.title, tuple(square(row, bit) for bit in range(BITS)), False) for row in rows)
    legend = (("none", "unnoticed"), ("p1", "noticed in the loss"), ("bad", "loss broken"))
    return Strip("Training on flipped weights, worst of all rounds, by bit", legend, made, _BITS_BELOW)


def _trained(source: Source, rows: Sequence[Row]) -> Table:
    names = ("noticed_bits", "broken_bits", "lowest_noticed_bit")
    headings = ("bits noticed in the loss", "bits that break it", "lowest bit noticed")
    title = f"Training, of {BITS} bits: medians (lowest{NOTHING}highest)"
    return table(title, headings, rows, lambda row: [source.cell(row, name, whole) for name in names])


def _loaded_strip(source: Source, rows: Sequence[Row]) -> Strip:
    def square(row: Row, bit: int) -> tuple[str, Number | None]:
        refused = source.number(row, f"refused, bit {bit}", whole)
        if refused is None:
            return "none", None
        return ("good" if refused.value else "bad"), refused

    made = tuple((row.title, tuple(square(row, bit) for bit in range(BITS)), is_ours(row)) for row in rows)
    legend = (("good", "the loader refuses"), ("bad", "loaded without a word"), ("none", "not found"))
    return Strip("Loading a checkpoint with the bit flipped in its file, by bit", legend, made, _BITS_BELOW)


def _loaded(source: Source, rows: Sequence[Row]) -> Table:
    names = ("found", "refused", "silent")
    headings = ("bits found in files and flipped", "refused", "loaded")
    return table("Loaders", headings, rows, lambda row: [source.cell(row, name, whole) for name in names])


REPORT = SuiteReport(
    "One flipped bit in a weight: who notices?",
    (
        "Each bit position of fp32 weights is flipped, from the least of the fraction to the sign. "
        "Training: the flipped weights are trained on, and the losses compared with a training without "
        "the flip. Noticed: "
        f"the loss is off by more than {100 * NOTICED_LOSS:.0f} % within {STEPS} steps; broken: it "
        "is infinite or not a number. Loader: the same bit is flipped inside of the checkpoint's files. "
        "Where a format compresses, a weight's bits cannot be found in its files.",
    ),
    _items,
)
