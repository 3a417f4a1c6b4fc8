"""view: runs as a web page, and the data behind it. What the command ``everystep view`` shows.

    from everystep import view

    view.write_page(["runs/gpt"], "gpt.html")
    view.view_runs(["runs/gpt"])[0].summary

| module | what it owns |
|---|---|
| `timeline` | events as columns to draw: saves, what a crash would have lost, everything else |
| `leaf_samples` | elements of leaves, sampled in bounded time, as small histograms |
| `leaf_changes` | how far two checkpoints are apart, leaf by leaf |
| `contents` | one checkpoint: leaves, values, which rank wrote it |
| `disks` | file systems below a run, and their free space |
| `run_reader` | a run, read again and again while a training goes on |
| `web_page` | the page as one file |
| `server` | the page on localhost, with a token |
| `html_page` | one self-contained HTML page: script, style and data inside |
| `budget` | how much may be read |
| `words` | text of other programs, as a page may hold it |

The folder ``page`` has the page's style and script: plain CSS and JavaScript, without a build. Nothing here
prints or writes to a run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from everystep.store.stream.progress import Progress, no_progress
from everystep.view.run_reader import RunView
from everystep.view.server import PageServer
from everystep.view.web_page import WrittenPage, open_runs, verify_runs, write_page

__all__ = [
    "PageServer",
    "RunView",
    "WrittenPage",
    "serve_page",
    "view_runs",
    "write_page",
]


def view_runs(runs: Sequence[str | os.PathLike[str]]) -> tuple[RunView, ...]:
    """What a page shows of runs, as data. Reads events and manifests, and no arrays.

    Args:
        runs: Runs, checkpoints, or directories of runs.
    """
    return tuple(reader.view() for reader in open_runs(runs))


def serve_page(
    runs: Sequence[str | os.PathLike[str]],
    *,
    port: int = 0,
    verify: bool = False,
    progress: Progress = no_progress,
) -> PageServer:
    """Serve a page that shows runs, to this machine alone, live while trainings go on.

    Raises `everystep.CheckpointNotFound` if a directory is missing.

    Args:
        runs: Runs, checkpoints, or directories of runs.
        port: The port; 0 takes any that is free.
        verify: First read every byte of every checkpoint.
        progress: Called with the bytes verified so far, and the bytes in all.
    """
    readers = open_runs(runs)
    for reader in readers:
        reader.view()
    if verify:
        verify_runs(readers, progress)
    return PageServer(readers, port)
