"""The page itself: one file with everything inside, or the shell of one that asks its server."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everystep import __version__
from everystep.engine.atomic_file import replace_file
from everystep.errors import EverystepError
from everystep.inspect.run_listing import is_run, runs_below
from everystep.inspect.verification import verify_all
from everystep.paths import local_path
from everystep.store import is_checkpoint, locate, resolve
from everystep.store.stream.progress import Progress, no_progress
from everystep.view.budget import Budget
from everystep.view.contents import Contents
from everystep.view.html_page import assemble
from everystep.view.leaf_changes import ChangedLeaf, Changes
from everystep.view.leaf_samples import LeafSample
from everystep.view.run_reader import RunReader, RunView
from everystep.view.words import labels

MAX_RUNS = 64
_PAGE = Path(__file__).parent / "page"
_SCRIPTS = ("basics.js", "charts.js", "timeline.js", "leaves.js", "changes.js", "places.js", "main.js")


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run with what was read of its arrays. A page with a server fetches that itself."""

    view: RunView
    contents: tuple[Contents, ...] = ()
    changes: tuple[Changes, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """What the script of a page is given. `served`: a server has more, and news.

    There are many samples and changed leaves, so each is written as a list; these are the names of its items.
    """

    served: bool
    version: str
    made: float
    runs: tuple[ShownRun, ...]
    sample_fields: tuple[str, ...] = LeafSample.__struct_fields__
    change_fields: tuple[str, ...] = ChangedLeaf.__struct_fields__


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """A page that was written.

    Attributes:
        path: The file.
        nbytes: Its size.
        runs: The runs that it shows.
    """

    path: str
    nbytes: int
    runs: tuple[str, ...]


def open_runs(runs: Sequence[str | os.PathLike[str]]) -> tuple[RunReader, ...]:
    """Readers of runs, with short names that differ. A parent directory stands for every run in it."""
    paths = list(dict.fromkeys(path for run in runs for path in _meant(locate(run))))
    if len(paths) > MAX_RUNS:
        raise ValueError(f"a page shows at most {MAX_RUNS} runs, and these are {len(paths)}")
    return tuple(RunReader(path, name) for path, name in zip(paths, labels(paths), strict=True))


def _meant(path: str) -> list[str]:
    """The runs to show; an error that says what is there instead, if there are none."""
    if is_checkpoint(path) or is_run(path):
        return [path]
    below = list(runs_below(path)) if os.path.isdir(path) else []
    return below or [resolve(path)]


def write_page(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    seconds: float = 10.0,
    verify: bool = False,
    progress: Progress = no_progress,
) -> WrittenPage:
    """Write a page that shows runs or checkpoints into one file. A file that is there is replaced.

    Raises `everystep.CheckpointNotFound` if a directory is missing.

    Args:
        runs: Runs, checkpoints, or directories of runs.
        path: The file to write.
        seconds: About how long arrays may be read, for histograms and changes.
        verify: First read every byte of every checkpoint, and show what was found.
        progress: Called with the bytes verified so far, and the bytes in all.
    """
    where = local_path(path)
    readers = open_runs(runs)
    if verify:
        verify_runs(readers, progress)
    shown = tuple(_with_arrays(reader, seconds / len(readers)) for reader in readers)
    text = page_text(shown, served=False)
    data = text.encode()
    try:
        replace_file(where, data)
    except OSError as error:  # name the page, not the temporary file beside it
        raise OSError(error.errno, os.strerror(error.errno or 0), where) from error
    return WrittenPage(where, len(data), tuple(run.view.path for run in shown))


def verify_runs(readers: Sequence[RunReader], progress: Progress = no_progress) -> None:
    """Reads every byte of every Everystep checkpoint. The readers show what was found."""
    for reader in readers:
        ours = is_checkpoint(reader.path) or (os.path.isdir(reader.path) and is_run(reader.path))
        if ours and reader.view().checkpoints:
            reader.note_reports(verify_all(reader.path, progress=progress))


def page_text(runs: Sequence[ShownRun], *, served: bool) -> str:
    """A page as HTML. One that is served fetches everything but these runs from its server."""
    style, body, script = _parts()
    names = ", ".join(run.view.name for run in runs)
    return assemble(
        title=f"{names} \N{MIDDLE DOT} Everystep",
        style=style,
        body=body,
        script=script,
        document=Document(served, __version__, time.time(), tuple(runs)),
        may_fetch=served,
    )


@functools.cache
def _parts() -> tuple[str, str, str]:
    scripts = "\n".join((_PAGE / name).read_text("utf-8") for name in _SCRIPTS)
    style, body = ((_PAGE / name).read_text("utf-8") for name in ("style.css", "body.html"))
    return style, body, f'"use strict";\n(() => {{\n{scripts}\n}})();'


def _with_arrays(reader: RunReader, seconds: float) -> ShownRun:
    """The newest checkpoint, and how it differs from the one before and from the oldest."""
    view = reader.view()
    intact = [entry.name for entry in view.checkpoints if entry.damage is None]
    problems: list[str] = []
    found: list[Contents] = []
    changes: list[Changes] = []
    others = dict.fromkeys([*intact[-2:-1], *intact[: len(intact) > 1]])
    share = seconds / (1 + len(others))
    for name in intact[-1:]:
        with _noting(problems):
            found.append(reader.contents(name, budget=Budget(share)))
        if not found:  # arrays are damaged: its leaves can still be listed
            with _noting(problems):
                found.append(reader.contents(name))
        for other in others:
            with _noting(problems):
                changes.append(reader.changes(other, name, budget=Budget(share)))
    return ShownRun(view, tuple(found), tuple(changes), tuple(problems))


@contextlib.contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Damage, and checkpoints that retention removes meanwhile, are shown on the page."""
    try:
        yield
    except (EverystepError, OSError) as error:
        problems.append(str(error))
