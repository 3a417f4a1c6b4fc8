"""Builds the environments in which tests marked `peers` run other systems, for `make peers`.

    python tools/peers.py            all of them
    python tools/peers.py NAME...    these

Each is a virtual environment ``build/peers/NAME`` without everystep. What is in them is the table in
`everystep_study.environments`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from everystep_study.environments import ENVIRONMENTS, build

FOLDER = Path(__file__).resolve().parent.parent / "build" / "peers"


def main(names: list[str]) -> int:
    if unknown := set(names) - set(ENVIRONMENTS):
        print(
            f"peers: there are {', '.join(ENVIRONMENTS)}, not {', '.join(sorted(unknown))}", file=sys.stderr
        )
        return 2
    for name in names or ENVIRONMENTS:
        build(name, FOLDER, lambda said: print(f"peers: {said}", flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
