"""The process in which a framework runs: ``python -m everystep_study.frameworks.worker MODULE``.

It imports MODULE, which has a `api.Framework` named ``FRAMEWORK``, and follows the orders on its standard
input, one JSON object per line: ``{"do": "train", ...}``. It answers each with one line: ``{"ok": {...}}``,
``{"missing": WHY}`` or ``{"failure": WHY}``. It ends when its input ends.

This module owns the lines in and out, and what becomes of errors. `orders` has what the orders do, and
`process` is the harness's end.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any

from everystep_study.frameworks.orders import ORDERS
from everystep_study.frameworks.orders.context import Context

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def _end_with_parent() -> None:
    """A framework that hangs must not outlive a harness that was killed. Linux only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main(module: str) -> None:
    _end_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    context, missing = None, ""
    try:
        context = Context(importlib.import_module(module).FRAMEWORK)
    except ImportError as error:
        missing = f"{type(error).__name__}: {error}"
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if context is None:
            answer: dict[str, Any] = {"missing": missing}
        else:
            try:
                answer = {"ok": ORDERS[order.pop("do")](context, **order)}
            except Exception as error:  # whatever a framework can raise: it is reported, and costs its row
                first = (str(error).strip().splitlines() or ["no message"])[0]
                answer = {"failure": f"{type(error).__name__}: {first[:500]}"}
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
