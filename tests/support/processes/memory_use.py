"""How much memory something takes, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

needs_peak = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory cannot be reset here"
)


def in_own_process(script: str, *arguments: object, timeout: float = 300) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MEASURE = """
    import sys
    import numpy as np
    import everystep

    def kib(field):
        with open("/proc/self/status") as file:
            return int(next(line for line in file if line.startswith(field)).split()[1])

    def growth(work):
        '''Peak of resident memory during the work, above what was there before, in MiB.'''
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = kib("VmRSS")
        work()
        return (kib("VmHWM") - before) / 1024
"""
