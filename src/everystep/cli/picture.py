"""What all pictures share: file formats, colours, and a figure that changes no global settings.

It imports matplotlib when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")

INK = "#1f2933"
QUIET = "#7b8794"
GRID = "#e4e7eb"
OURS = "#0b7285"
OURS_LIGHT = "#66b2c0"
PEER = "#b8c2cc"
ALERT = "#d9480f"
BEHIND_WORDS = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
"""Text may cross lines."""


def check_suffix(path: Path) -> str:
    """The file format, by the suffix of a picture's name. Raises `ValueError` for others."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"a picture is written as {' or '.join(SUFFIXES)}, not as {path.name!r}")
    return suffix[1:]


def require_matplotlib() -> None:
    """Raises a RuntimeError that says what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError("a picture needs matplotlib: pip install matplotlib") from error


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches to draw on, written to `path` at the end; the suffix chooses PNG or SVG."""
    form = check_suffix(path)
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of our own, not pyplot's: no global state, no display, no effect on the caller's settings.
    with rc_context(
        {"font.family": ["DejaVu Sans"], "font.size": 10.5, "text.color": INK, "svg.fonttype": "none"}
    ):
        figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, format=form, facecolor="white")
