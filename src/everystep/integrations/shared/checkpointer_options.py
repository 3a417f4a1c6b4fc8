"""The options that a callback keeps for the `Checkpointer` it makes when the training begins."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from everystep.checkpointer import Checkpointer
from everystep.checkpointer.opening import Arguments
from everystep.checkpointer.preemption import checked_exit_code


def checked(options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The options, checked now: a mistake should not wait until data are loaded and a model is built."""
    parameters = inspect.signature(Checkpointer).parameters.values()
    usual = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    for name in options:
        if name not in usual:
            raise TypeError(
                f"{owner}: {name!r} is no option of everystep.Checkpointer, which has {', '.join(usual)}"
            )
    known = {**usual, **options}
    names = {field.name for field in fields(Arguments)} - {"run"}
    Arguments(run="", **{name: known[name] for name in names}).schedule()
    checked_exit_code(known["preemption_exit_code"])
    return dict(options)
