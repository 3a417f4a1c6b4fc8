"""A process that follows orders: ``python -m everystep_study.workers.worker``, started by `workers`.

It reads orders from its standard input, one JSON object per line: ``{"do": "MODULE:FUNCTION", ...}``. It
calls that function with its `Context` and the rest of the object, and answers with one line:
``{"ok": {...}}`` or ``{"failure": WHY}``. It ends when its input ends, at the latest with its parent.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys

from everystep_study.workers.orders import Context

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def _end_with_parent() -> None:
    """A framework that hangs must not outlive a harness that was killed. Linux only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main() -> None:
    _end_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to standard error
    context = Context()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        module, _, name = order.pop("do").partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            answer = {"ok": function(context, **order)}
        except Exception as error:  # of any kind: it is reported, and costs its row
            first = (str(error).strip().splitlines() or ["no message"])[0]
            answer = {"failure": f"{type(error).__name__}: {first[:500]}"}
        os.write(answers, json.dumps(answer).encode() + b"\n")
    context.at_end.close()


if __name__ == "__main__":
    main()
