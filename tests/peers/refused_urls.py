"""Gives URLs to every call of a framework's integration that takes a path: ``python refused_urls.py NAME``.

The working directory must be empty. Prints one line for each call.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import everystep
from support.processes.path_calls import CALLS, framework_of


def main(framework: str) -> None:
    for name, call in CALLS.items():
        if framework_of(name) != framework:
            continue
        for url in ("s3://bucket/run", Path("gs://bucket/run"), "file:///tmp/everystep-url/run"):
            try:
                call(url)
            except everystep.errors.UnsupportedURL:
                pass
            else:
                raise SystemExit(f"{name} took {url}")
            made = os.listdir()
            if made or os.path.exists("/tmp/everystep-url"):
                raise SystemExit(f"{name} of {url} made {made}")
        print(f"refused: {name}")


if __name__ == "__main__":
    main(sys.argv[1])
