"""``everystep study run``: which parts there are, how much time each gets, and measuring them one after the
other.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import everystep
from everystep_study import frameworks
from everystep_study.frameworks import FrameworkEntry
from everystep_study.frameworks.models import MODELS
from everystep_study.harness import runner
from everystep_study.harness.files import remove
from everystep_study.harness.machine import machine_facts
from everystep_study.harness.results_directory import Entry, Header, Part, ResultsDirectory
from everystep_study.suites.bitflips import BitflipsSuite
from everystep_study.suites.by_framework import FrameworkSuite
from everystep_study.suites.cost import CostSuite
from everystep_study.suites.determinism import DeterminismSuite
from everystep_study.suites.formats import FormatsSuite
from everystep_study.suites.scale import ScaleSuite

QUICK_SECONDS = 270.0
"""What `--quick` divides among its parts; none begins later."""
LAST_PART_SECONDS = 10.0
"""How much longer the last part of a quick study may take before it is cut off. What is then left of five
minutes is for ending processes and removing files.
"""
QUICK_MODELS = ("mlp",)
FORMATS_MODEL, QUICK_FORMATS_MODEL = "resnet50", "mlp"

SUITES: dict[str, type[FrameworkSuite]] = {
    "cost": CostSuite,
    "scale": ScaleSuite,
    "determinism": DeterminismSuite,
    "bitflips": BitflipsSuite,
    "formats": FormatsSuite,  # the longest: if the time is up, the others are there
}
_WEIGHTS = {"cost": 0.7, "determinism": 0.5, "formats": 2.5}
"""How much of the time a part gets."""


@dataclass(frozen=True, slots=True)
class Options:
    """`models`: none for the usual ones. `minutes` bounds a study that is not quick; None for as long as it
    takes.
    """

    suites: tuple[str, ...] = tuple(SUITES)
    frameworks: tuple[str, ...] = tuple(frameworks.FRAMEWORKS)
    models: tuple[str, ...] = ()
    quick: bool = False
    seed: int = 0
    rounds: int | None = None
    minutes: float | None = None

    @property
    def seconds(self) -> float | None:
        return 60 * self.minutes if self.minutes else QUICK_SECONDS if self.quick else None

    @property
    def end_seconds(self) -> float:
        """When a part in progress is cut off. Only quick parts are short enough to be repeated for that."""
        return self.seconds + LAST_PART_SECONDS if self.quick and self.seconds else math.inf


def suite_names(words: Sequence[str]) -> tuple[str, ...]:
    """The suites that were asked for; none or "all" is all of them."""
    wanted = [word.strip() for text in words for word in text.split(",")]
    unknown = sorted(set(wanted) - {*SUITES, "all"})
    if unknown:
        raise ValueError(f"there is no suite {', '.join(unknown)}; there are {', '.join(SUITES)} and all")
    return tuple(name for name in SUITES if not wanted or "all" in wanted or name in wanted)


def model_names(words: str | None) -> tuple[str, ...]:
    """The models that were asked for; none for the usual ones."""
    wanted = () if words is None else tuple(word.strip() for word in words.split(","))
    unknown = [name for name in wanted if name not in MODELS]
    if unknown:
        raise ValueError(f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    return tuple(model for model in MODELS if model in wanted)


def parts_of(options: Options) -> list[Part]:
    """In the order in which they are measured: every suite of every framework first, then further models."""
    found = [
        (number, Part(suite, name, model))
        for suite in options.suites
        for name in options.frameworks
        if suite in frameworks.FRAMEWORKS[name].suites
        for number, model in enumerate(_models(suite, frameworks.FRAMEWORKS[name], options))
    ]
    return [part for _, part in sorted(found, key=lambda pair: pair[0])]


def _models(suite: str, framework: FrameworkEntry, options: Options) -> tuple[str, ...]:
    wanted = options.models or (QUICK_MODELS if options.quick else MODELS)
    if suite == "cost":
        return tuple(model for model in wanted if model in framework.models)
    if suite == "formats":
        usual = QUICK_FORMATS_MODEL if options.quick else FORMATS_MODEL
        return (usual,) if usual in wanted else wanted[-1:]
    return ("",)


def run(directory: Path, options: Options, console: Console, say: Callable[[str], None]) -> ResultsDirectory:
    """Measures what is not there yet. May be interrupted, and called again.

    When the time is up, the part in progress is cut off and left for the next call, which begins with it. The
    first part that a call measures is kept as far as it got: it would not get further in another call.
    """
    directory.mkdir(parents=True, exist_ok=True)
    machine = machine_facts(directory, os.getloadavg()[0], None)
    header = Header(time.time(), options.quick, options.seed, everystep.__version__, machine)
    found = ResultsDirectory.open(directory, header)
    for left_over in directory.glob(f"{runner.FOLDER_PREFIX}*"):
        remove(left_over)  # of a study that was killed
    began = time.monotonic()
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    try:
        parts = parts_of(options)
        left = [part for part in parts if not found.has(part)]
        if len(left) < len(parts):
            say(f"{len(parts) - len(left)} of {len(parts)} parts have been measured before")
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(parts), completed=len(parts) - len(left))
            unmeasured, kept_one = len(left), False
            for index, part in enumerate(left):
                spent = time.monotonic() - began
                if kept_one and options.seconds is not None and spent > options.seconds:
                    break
                seconds = _share(options.seconds, spent, left[index:])
                suite = make_suite(part, options, seconds, began + options.end_seconds)

                def tell(said: str, part: Part = part) -> None:
                    progress.update(task, description=f"{part.suite}: {said}")

                tell(part.framework)
                result = runner.run(suite, directory, console, say=tell)
                if kept_one and time.monotonic() >= suite.end:
                    break
                entry = Entry(part, suite.versions, result)
                found.append(entry)
                unmeasured, kept_one = unmeasured - 1, kept_one or not entry.missing
                progress.advance(task)
                troubles = {(row.title, row.status, row.reason): None for row in result.rows if row.reason}
                for title, status, reason in troubles:
                    say(f"{part}: {title}: {status}. {reason}")
        if unmeasured:
            say(f"the time is up: {unmeasured} parts are left for another call")
    finally:
        found.close()
    return found


def make_suite(part: Part, options: Options, seconds: float | None, end: float) -> FrameworkSuite:
    entry = frameworks.FRAMEWORKS[part.framework]
    more: dict[str, Any] = {"end": end}
    if options.rounds is not None:
        more["rounds"] = options.rounds
    return SUITES[part.suite](part.framework, entry, part.model, options.quick, options.seed, seconds, **more)


def _share(total: float | None, spent: float, left: Sequence[Part]) -> float | None:
    """What the first of the parts that are left may take of the time that is left."""
    if total is None:
        return None
    weights = [_WEIGHTS.get(part.suite, 1.0) for part in left]
    return max(1.0, total - spent) * weights[0] / sum(weights)
