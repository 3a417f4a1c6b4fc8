"""engine: bytes between memory and the device, as fast as the device allows.

The Python face of the C++ core (``native/``). It knows nothing of tensors, checkpoints or runs.

| module | what it owns |
|---|---|
| `transfer` | jobs: writing and reading one file; copies and fingerprints of memory |
| `buffers` | descriptions of memory: where bytes come from and go to; memory as numpy arrays |
| `tuning` | window sizes and queue depths |
| `probe` | which backend a directory gets, and why |
| `fs` | durable file-system operations, through the fault seam |
| `atomic_file` | files that are replaced whole or not at all |
| `faults` | making calls fail on purpose, for tests and drills |
| `threads` | starting threads and waiting for them, safe from signal handlers that raise |
"""

from __future__ import annotations

from everystep._native import (
    NativePin,
    NativeShelf,
    NativeShelfClosed,
    NativeShelfDamaged,
    NativeShelfForeign,
    NativeShelfFull,
    NativeShelfNewer,
    NativeTransaction,
    Pieces,
    array_memory,
    empty_shelf,
    forks,
    huge_pages_given,
    page_sizes,
    shelf_medium,
    write_back_instruction,
    xxh3_64,
    xxh3_64_each,
)
from everystep.engine.buffers import ByteSource, Consumed, Destination, Memory, Produced, Strided
from everystep.engine.probe import (
    BACKENDS,
    Backend,
    Capabilities,
    capabilities,
    choose_backend,
    choose_read_backend,
)
from everystep.engine.transfer import (
    CHUNK_NBYTES,
    Damage,
    Packed,
    Padding,
    ReadPiece,
    Unkept,
    WriteJob,
    WritePiece,
    copy,
    destinations,
    fingerprints,
    fresh_bytes,
    pack,
    read,
    write,
)
from everystep.engine.tuning import ALIGNMENT, READING, SAVING, Tuning

__all__ = [
    "ALIGNMENT",
    "BACKENDS",
    "CHUNK_NBYTES",
    "READING",
    "SAVING",
    "Backend",
    "ByteSource",
    "Capabilities",
    "Consumed",
    "Damage",
    "Destination",
    "Memory",
    "NativePin",
    "NativeShelf",
    "NativeShelfClosed",
    "NativeShelfDamaged",
    "NativeShelfForeign",
    "NativeShelfFull",
    "NativeShelfNewer",
    "NativeTransaction",
    "Packed",
    "Padding",
    "Pieces",
    "Produced",
    "ReadPiece",
    "Strided",
    "Tuning",
    "Unkept",
    "WriteJob",
    "WritePiece",
    "array_memory",
    "capabilities",
    "choose_backend",
    "choose_read_backend",
    "copy",
    "destinations",
    "empty_shelf",
    "fingerprints",
    "forks",
    "fresh_bytes",
    "huge_pages_given",
    "pack",
    "page_sizes",
    "read",
    "shelf_medium",
    "write",
    "write_back_instruction",
    "xxh3_64",
    "xxh3_64_each",
]
