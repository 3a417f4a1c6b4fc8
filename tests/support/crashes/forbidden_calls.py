"""Scripts in a process of its own, in which a system call can be forbidden while they run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

_FORBID = """
import ctypes, errno, os, platform, struct, sys

IO_URING_SETUP, IO_URING_ENTER = 425, 426
SYNC_FILE_RANGE = {"x86_64": 277, "aarch64": 84}.get(platform.machine())
_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(platform.machine())

def forbid(call, code):
    "For all threads, from now on: what the seccomp profile of a container does from the start."
    libc = ctypes.CDLL(None, use_errno=True)
    rules = [  # load the number of the call; that one: fail with the code; all others: allow
        (0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | code), (0x06, 0, 0, 0x7FFF0000),
    ]
    filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(filter)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.syscall(_SECCOMP, 1, 1, program) == 0, ctypes.get_errno()
"""


def run(script: str, *arguments: object, **environment: str) -> str:
    """What the script prints. It has `forbid`, and the numbers of some calls."""
    done = subprocess.run(
        [sys.executable, "-c", _FORBID + textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    return done.stdout.strip()
