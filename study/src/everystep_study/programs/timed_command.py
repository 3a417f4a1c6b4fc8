"""Run by any Python: a command, and what it cost inside its process. Everystep need not be installed there.

    python timed_command.py MODULE FUNCTION ARGUMENTS...

Imports MODULE, calls FUNCTION with the arguments in ``sys.argv``, and prints readings as the last line:
seconds after all imports, the peak of resident memory of the largest process, and the bytes that it and its
children sent to storage.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time


def field(path: str, name: str) -> int:
    with open(path) as file:
        return int(next(line for line in file if line.startswith(name)).split()[1])


def main() -> None:
    module, function = sys.argv[1:3]
    home = importlib.import_module(module)
    if hasattr(home, "parse_arguments"):  # DeepSpeed's converter parses outside of its main function
        sys.argv = sys.argv[2:]
        arguments = [home.parse_arguments()]
    else:
        importlib.import_module("everystep.universal")
        sys.argv, arguments = sys.argv[2:], []
    began = time.perf_counter()
    try:
        getattr(home, function)(*arguments)
    except SystemExit as end:
        if end.code:
            raise
    seconds = time.perf_counter() - began
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    readings = {
        "inside_seconds": seconds,
        "process_nbytes": max(field("/proc/self/status", "VmHWM:") * 1024, children),
        "written_nbytes": field("/proc/self/io", "write_bytes:"),
    }
    sys.stdout.flush()
    print("\n" + json.dumps(readings))


if __name__ == "__main__":
    main()
