"""What the study's report says of each suite: which readings become which columns and bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.study import frameworks
from holdfast.study.frameworks.models import TITLES
from holdfast.study.frameworks.orders.bitflips import NOTICED_LOSS
from holdfast.study.report_parts import (
    NOTHING,
    Bar,
    Cell,
    Chart,
    Number,
    Part,
    Section,
    Source,
    Strip,
    Table,
    Words,
    mebibytes,
    milliseconds,
    ratio,
    small,
    whole,
)
from holdfast.study.results import PEAK_NBYTES, SECONDS, Row
from holdfast.study.results_directory import Entry, ResultsDirectory
from holdfast.study.suites.bitflips import BITS
from holdfast.study.suites.bitflips import STEPS as FLIP_STEPS
from holdfast.study.suites.cost import EVERY, STEPS
from holdfast.study.suites.rank_waiting import PROJECTED, WORLDS

KINDS = ("durable", "not durable")
CONTENTS = ("weights and optimizer", "weights")


def sections(found: ResultsDirectory) -> list[Section]:
    """Those suites that were measured, in their order."""
    made = []
    for key, build in _SECTIONS.items():
        entries = [entry for entry in found.entries if entry.part.suite == key]
        if entries:
            section = build(entries)
            section.notes += notes(entries)
            made.append(section)
    return made


def notes(entries: Sequence[Entry]) -> list[str]:
    """What was not measured, and why."""
    found: dict[str, None] = {}
    for entry in entries:
        for row in entry.result.rows:
            if row.status != "measured":
                found[f"{name_of(entry)}: {row.title}: {row.status}. {row.reason}"] = None
        for problem in entry.result.problems:
            found[f"{name_of(entry)}: {problem}"] = None
    return list(found)


def name_of(entry: Entry) -> str:
    known = frameworks.FRAMEWORKS.get(entry.part.framework)
    title = known.title if known is not None else entry.part.framework
    model = TITLES.get(entry.part.model, entry.part.model)
    return f"{title}, {model}" if model else title


def is_ours(row: Row) -> bool:
    return row.case.startswith("holdfast")


def mechanism_of(row: Row) -> str:
    return row.case.partition(", ")[0]


def cost(entries: Sequence[Entry]) -> Section:
    section = Section(
        "cost",
        "What a checkpoint costs a training",
        [
            "Stall: how much longer the training takes per checkpoint, all effects included: the call "
            "itself, waiting for the checkpoint before, and steps that are slower because something is "
            f"written beside them. It is measured as {STEPS} steps with checkpoints minus {STEPS} steps "
            "without, in the same turn.",
            "Serialising is the time of a save into memory (a tmpfs); writing is how much longer the same "
            "save takes on the disk; syncing is what it then takes until the files and their directories "
            "survive a power cut. Not durable means: the save returned, and a power cut may lose it. "
            "The two are never mixed: each column and bar says which it is. Holdfast is always durable.",
        ],
    )
    if glance := _at_a_glance(entries):
        section.parts.append(Part("At a glance", (glance,)))
    for entry in entries:
        source = Source(entry)
        items: list[Table | Chart | Strip] = []
        if split := source.rows("durable split"):
            items.append(_split_chart(source, split))
        if source.rows(f"durable every {EVERY[0]}"):
            items.append(_stall_chart(source))
            items += [_stall_table(source, kind) for kind in KINDS]
        section.parts.append(Part(name_of(entry), tuple(items)))
    return section


def _at_a_glance(entries: Sequence[Entry]) -> Table | None:
    """The first mechanism of each framework, which is its usual one, and the fastest of its others, beside
    Holdfast's best.
    """
    section, reading = f"durable every {EVERY[0]}", "stall_seconds"
    rows = []
    for entry in sorted(entries, key=_by_model):
        source = Source(entry)
        found = [row for row in source.rows(section) if row.samples]
        by_stall = sorted(found, key=lambda row: row.median(reading) or 0)
        own = next((row for row in found if not is_ours(row)), None)
        best = next((row for row in by_stall if is_ours(row)), None)
        other = next((row for row in by_stall if not is_ours(row)), None)
        if own is None or best is None or other is None:
            continue

        def compared(row: Row, best: Row = best, source: Source = source) -> Cell:
            shown = ratio(source.number(best, reading), source.number(row, reading))
            return Words(NOTHING) if shown is None else (shown,)

        def stalled(row: Row, source: Source = source) -> Cell:
            shown = source.number(row, reading)
            title = row.title.rpartition(", ")[2] if is_ours(row) else row.title
            return Words(NOTHING) if shown is None else (shown, Words(f" {title}"))

        same = other is own
        cells = (
            stalled(own),
            Words(NOTHING) if same else stalled(other),
            stalled(best),
            compared(own),
            Words(NOTHING) if same else compared(other),
        )
        rows.append((name_of(entry), cells, False))
    headings = (
        "usual mechanism, ms",
        "its fastest other, ms",
        "Holdfast, ms",
        "of the usual",
        "of the fastest",
    )
    return Table("A durable checkpoint after every step", headings, tuple(rows)) if rows else None


def _by_model(entry: Entry) -> tuple[int, int]:
    known, models = list(frameworks.FRAMEWORKS), list(TITLES)
    name, model = entry.part.framework, entry.part.model
    return (
        models.index(model) if model in models else len(models),
        known.index(name) if name in known else len(known),
    )


def _split_chart(source: Source, rows: Sequence[Row]) -> Chart:
    def parts(row: Row) -> tuple[Number | None, ...]:
        return tuple(source.number(row, f"{name}_seconds") for name in ("serialise", "write", "sync"))

    bars = tuple(Bar(row.title, parts(row), is_ours(row)) for row in rows)
    return Chart("One durable save, medians", "ms", ("serialising", "writing", "syncing"), bars)


def _stall_chart(source: Source) -> Chart:
    bars = []
    for kind in KINDS:
        for row in source.rows(f"{kind} every 1"):
            number, low, high = (
                source.number(row, "stall_seconds", milliseconds, name) for name in ("median", "low", "high")
            )
            bars.append(Bar(f"{row.title}, {kind}", (number,), is_ours(row), low, high))
    return Chart("Stall per checkpoint, one after every step", "ms", (), tuple(bars))


def _stall_table(source: Source, kind: str) -> Table:
    headings = [f"stall, every {_steps(every)}, ms" for every in EVERY]
    headings += ["training slower by, every step, %", "in the call, ms"]
    parts = {"serialise": "serialising", "write": "writing", "sync": "syncing"} if kind == "durable" else {}
    headings += [f"{title}, ms" for title in parts.values()]
    rows = []
    for row in source.rows(f"{kind} every {EVERY[0]}"):
        split = source.row(f"{kind} split", row.case)
        cells = [
            source.cell(source.row(f"{kind} every {every}", row.case), "stall_seconds") for every in EVERY
        ]
        cells += [source.cell(row, "lost_percent", whole), source.cell(row, "call_seconds", spread=False)]
        cells += [source.cell(split, f"{name}_seconds", spread=False) for name in parts]
        rows.append((row.title, tuple(cells), is_ours(row)))
    return Table(f"{kind.capitalize()}: medians (lowest{NOTHING}highest)", tuple(headings), tuple(rows))


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def formats(entries: Sequence[Entry]) -> Section:
    section = Section(
        "formats",
        "What is on the disk, and what it withstands",
        [
            "Loads start with an empty page cache where the machine allows it, and go into a training that "
            "was built from another seed; every load that is shown brought back every bit. Memory is how far "
            "the resident memory of the process grew. Save times are not durable ones, except for Holdfast: "
            "for a comparison of saves, read the table of costs.",
            "Trouble was made, not looked up. Flipped bits: one at a time, anywhere in the files; a loader "
            "either refuses the checkpoint, or loads other values without a word, or the bit does not "
            "matter. Planted code: a pickle in place of each file and of each member of an archive, and what "
            "else the format offers. Killed: the process was killed in the middle of overwriting a "
            "checkpoint by the next one at the same place.",
        ],
    )
    for entry in entries:
        source = Source(entry)
        items: list[Table | Chart | Strip] = []
        items += [table for content in CONTENTS if (table := _sizes(source, content))]
        if source.rows("flipped bits"):
            items.append(_trouble(source))
        section.parts.append(Part(name_of(entry), tuple(items)))
    return section


def _sizes(source: Source, content: str) -> Table | None:
    saved = source.rows(f"save {content}")
    if not saved:
        return None
    rows = []
    for row in saved:
        load = source.row(f"load {content}", row.case)
        part = source.row(f"part of {content}", row.case)
        possible = source.number(part, "possible", whole)
        one = source.cell(part, "part_seconds", spread=False) if possible and possible.value else Words("no")
        cells: tuple[Cell, ...] = (
            source.cell(row, "arrays_nbytes", whole, spread=False),
            source.cell(row, "stored_nbytes", whole, spread=False),
            source.cell(row, SECONDS),
            source.cell(row, PEAK_NBYTES, mebibytes, spread=False),
            source.cell(load, SECONDS),
            source.cell(load, PEAK_NBYTES, mebibytes, spread=False),
            one,
        )
        rows.append((row.title, cells, is_ours(row)))
    headings = (
        "arrays, bytes",
        "on disk, bytes",
        "save, ms",
        "save, MiB of memory",
        "load, ms",
        "load, MiB of memory",
        "one array alone, ms",
    )
    return Table(f"{content.capitalize()}: medians (lowest{NOTHING}highest)", headings, tuple(rows))


def _trouble(source: Source) -> Table:
    def count(row: Row | None, reading: str, bad: bool) -> Cell:
        number = source.number(row, reading, whole)
        if number is None:
            return source.cell(row, reading)
        tone = ("bad" if bad else "good") if number.value else ""
        return number, Words("", tone)

    rows = []
    for flips in source.rows("flipped bits"):
        planted = source.row("planted code", flips.case)
        killed = source.row("killed while overwriting", flips.case)
        ran = source.number(planted, "ran", whole)
        cells: tuple[Cell, ...] = (
            source.cell(flips, "flips", whole),
            count(flips, "refused", False),
            count(flips, "silent", True),
            count(flips, "harmless", False),
            _planted(source, planted, ran),
            source.cell(killed, "kills", whole),
            count(killed, "old kept", False),
            count(killed, "new complete", False),
            count(killed, "lost", True),
        )
        rows.append((flips.title, cells, is_ours(flips)))
    headings = (
        "flipped bits",
        "refused",
        "loaded other values",
        "harmless",
        "planted code that ran",
        "kills while overwriting",
        "old one kept",
        "new one complete",
        "both lost",
    )
    return Table("Trouble", headings, tuple(rows))


def _planted(source: Source, row: Row | None, ran: Number | None) -> Cell:
    if row is None or ran is None:
        return source.cell(row, "ran")
    attacks = source.number(row, "attacks", whole)
    assert attacks is not None
    places = sorted(
        name.removeprefix("ran from ")
        for sample in row.samples
        for name in sample.readings
        if name.startswith("ran from ")
    )
    where = f": {', '.join(places)}" if places else ""
    return ran, Words(" of "), attacks, Words(where, "bad" if ran.value else "good")


def scale(entries: Sequence[Entry]) -> Section:
    section = Section(
        "scale",
        "Several ranks on this machine",
        [
            "All ranks hold the same state, as in data-parallel training, and save it together, durably. A "
            "rank waits inside of messages and collectives, and from its own end until that of the last "
            "rank; all else is writing. With torch.save, rank 0 writes everything and the others wait.",
            "The projection is no measurement: it is a straight line through the medians, and it assumes "
            "that the storage stays the same however many ranks there are.",
        ],
    )
    for entry in entries:
        source = Source(entry)
        items: list[Table | Chart | Strip] = []
        for number in WORLDS:
            rows = source.rows(f"{number} ranks")
            if not any(row.samples for row in rows):
                continue
            names = ("writing_seconds", "waiting_seconds")
            bars = tuple(
                Bar(row.title, tuple(source.number(row, name) for name in names), is_ours(row))
                for row in rows
            )
            ranks = "1 rank" if number == 1 else f"{number} ranks"
            items.append(Chart(f"{ranks}, mean of the ranks, medians", "ms", ("writing", "waiting"), bars))
            items.append(_ranks(source, rows, number, ranks))
        projected = source.rows("projection")
        if projected:
            items.append(_projection(source, projected))
        section.parts.append(Part(name_of(entry), tuple(items)))
    return section


def _ranks(source: Source, rows: Sequence[Row], number: int, ranks: str) -> Table:
    headings = ["until the last has ended, ms"]
    headings += [f"rank {rank}: {what}, ms" for rank in range(number) for what in ("writing", "waiting")]
    made = []
    for row in rows:
        cells = [source.cell(row, SECONDS)]
        for rank in range(number):
            for what in ("writing", "waiting"):
                cells.append(source.cell(row, f"{what}, rank {rank}", spread=False))
        made.append((row.title, tuple(cells), is_ours(row)))
    return Table(f"{ranks}: medians (lowest{NOTHING}highest)", tuple(headings), tuple(made))


def _projection(source: Source, rows: Sequence[Row]) -> Table:
    made = []
    for row in rows:
        cells = [source.cell(row, "seconds_fixed"), source.cell(row, "seconds_per_rank")]
        cells += [source.cell(row, f"seconds, {number} ranks") for number in PROJECTED]
        made.append((row.title, tuple(cells), is_ours(row)))
    headings = ("fixed, ms", "per rank, ms", *(f"{number} ranks, ms" for number in PROJECTED))
    return Table("Projection, not measured", headings, tuple(made))


def determinism(entries: Sequence[Entry]) -> Section:
    section = Section(
        "determinism",
        "Is a resumed training the same training?",
        [
            "A training of 2N steps is compared with N steps, a restore into a new training with "
            "another seed, and N more steps. The probe has dropout, noise and mirroring of its images, "
            "momentum, a scheduler, shuffled data and BatchNorm. First everything is restored; then all but "
            "one ingredient; then what the framework's documentation shows as its checkpoint.",
        ],
    )
    for entry in entries:
        source = Source(entry)
        made = [("left out", "Restored, but for this"), ("default", "Restored from the usual checkpoint")]
        tables = [_resumes(source, kind, title) for kind, title in made if source.rows(kind)]
        section.parts.append(Part(name_of(entry), tuple(tables)))
    return section


def _resumes(source: Source, section: str, title: str) -> Table:
    rows = []
    for row in source.rows(section):
        equal = source.number(row, "equal", whole)
        first = source.number(row, "first_differing_step", whole)
        verdict: Cell = Words(NOTHING if row.samples else row.status)
        if equal is not None:
            verdict = Words("the same bits", "good") if equal.value else Words("differs", "bad")
        step: Cell = Words(NOTHING) if first is None or not first.value else (first,)
        cells: list[Cell] = [
            verdict,
            step,
            source.cell(row, "steps", whole),
            source.cell(row, "largest_loss_difference", small),
            source.cell(row, "largest_weight_difference", small),
        ]
        if section == "default":
            cells.append(_forgotten(source, row))
        rows.append((row.title, tuple(cells), is_ours(row)))
    headings = ["result", "first differing step", "of steps", "largest difference of a loss", "of a weight"]
    headings += ["not restored"] if section == "default" else []
    return Table(title, tuple(headings), tuple(rows))


def _forgotten(source: Source, row: Row) -> Cell:
    titles = {other.case: other.title for other in source.rows("left out")}
    found = [
        titles.get(name.removeprefix("restored, "), "weights")
        for sample in row.samples
        for name, value in sample.readings.items()
        if name.startswith("restored, ") and not value
    ]
    return Words("; ".join(found), "bad") if found else Words("nothing" if row.samples else NOTHING)


_BITS_BELOW = ("0, least of the fraction", "23 to 30: exponent, 31: sign")


def bitflips(entries: Sequence[Entry]) -> Section:
    section = Section(
        "bitflips",
        "One flipped bit in a weight: who notices?",
        [
            "Each bit position of fp32 weights is flipped, from the least of the fraction to the sign. "
            "Training: the flipped weights are trained on, and the losses compared with a training without "
            "the flip. Noticed: "
            f"the loss is off by more than {100 * NOTICED_LOSS:.0f} % within {FLIP_STEPS} steps; broken: it "
            "is infinite or not a number. Loader: the same bit is flipped inside of the checkpoint's files. "
            "Where a format compresses, a weight's bits cannot be found in its files.",
        ],
    )
    for entry in entries:
        source = Source(entry)
        items: list[Table | Chart | Strip] = []
        if trained := source.rows("training"):
            items += [_trained_strip(source, trained), _trained(source, trained)]
        if loaded := source.rows("loader"):
            items += [_loaded_strip(source, loaded), _loaded(source, loaded)]
        section.parts.append(Part(name_of(entry), tuple(items)))
    return section


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
    made = [(row.title, tuple(source.cell(row, name, whole) for name in names), False) for row in rows]
    headings = ("bits noticed in the loss", "bits that break it", "lowest bit noticed")
    return Table(f"Training, of {BITS} bits: medians (lowest{NOTHING}highest)", headings, tuple(made))


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
    made = [(row.title, tuple(source.cell(row, name, whole) for name in names), is_ours(row)) for row in rows]
    return Table("Loaders", ("bits found in files and flipped", "refused", "loaded"), tuple(made))


_SECTIONS: dict[str, Callable[[Sequence[Entry]], Section]] = {
    "cost": cost,
    "formats": formats,
    "scale": scale,
    "determinism": determinism,
    "bitflips": bitflips,
}
