"""Who wrote how much of what was saved: read from what is on the disk, not from what was planned."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.format.manifest import MANIFEST_NAME, decode_part, decode_root
from holdfast.study.peers import files_below
from holdfast.study.ranks.results import Written

_DCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")


def written_at(path: Path, world: int) -> Written:
    """Of a checkpoint of any of the systems. What cannot be told apart by rank was written by rank 0."""
    stored = sum(file.stat().st_size for file in files_below(path))
    per_rank = [0] * world
    manifest = path / MANIFEST_NAME
    if manifest.is_file():
        root = decode_root(manifest.read_bytes(), str(manifest))
        parts = [root.part]
        for ref in root.parts:
            file = path / ref.file
            parts.append(decode_part(file.read_bytes(), str(file), ref))
        for part in parts:
            per_rank[part.rank] = sum(fragment.nbytes for leaf in part.leaves for fragment in leaf.fragments)
        return Written(tuple(per_rank), stored)
    for file in files_below(path):
        found = _DCP_FILE.fullmatch(file.name)
        per_rank[int(found[1]) if found is not None else 0] += file.stat().st_size
    return Written(tuple(per_rank), stored)
