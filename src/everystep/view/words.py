"""Text of other programs as a page may hold it: valid, and of bounded length. Escaping is `html_page`'s."""

from __future__ import annotations

import os
from collections.abc import Sequence

from everystep.inspect.description import exact_bytes
from everystep.state import Node

_MAX_VALUE = 200
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path need not be valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def shown_value(node: Node) -> str:
    """A value in its stored form, shortened."""
    return shortened(exact_bytes(node).decode("utf-8", "backslashreplace"))


def shortened(text: str, limit: int = _MAX_VALUE) -> str:
    return text if len(text) <= limit else text[: limit - 1] + ELLIPSIS


def labels(paths: Sequence[str]) -> list[str]:
    """A short name for each path: as many of its last parts as tell it from the others."""
    parts = [shown_path(os.path.abspath(path)).strip("/").split("/") for path in paths]
    depth = 1
    while depth < max((len(part) for part in parts), default=1):
        if len({tuple(part[-depth:]) for part in parts}) == len({tuple(part) for part in parts}):
            break
        depth += 1
    return ["/".join(part[-depth:]) or "/" for part in parts]
