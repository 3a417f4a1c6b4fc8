"""engine: bytes between memory and the device, as fast as the device allows.

The Python face of the C++ core (``native/``). It owns transfers (`write`, `read`), checksums, the choice of
backend (`choose_backend`), durable file-system operations (`fs`) and the fault seam that tests use
(`faults`). It knows nothing of tensors, checkpoints or runs.
"""

from __future__ import annotations

from holdfast._native import (
    NativeShelf,
    NativeShelfDamaged,
    NativeShelfForeign,
    NativeShelfFull,
    NativeShelfNewer,
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
from holdfast.engine.buffers import Consumed, Destination, Memory, Produced, Source, Strided
from holdfast.engine.probe import (
    BACKENDS,
    Backend,
    Capabilities,
    capabilities,
    choose_backend,
    choose_read_backend,
)
from holdfast.engine.transfer import (
    CHUNK_NBYTES,
    Damage,
    Packed,
    Padding,
    ReadColumns,
    ReadPiece,
    Unkept,
    WriteJob,
    WritePiece,
    copy,
    fingerprints,
    fresh_bytes,
    pack,
    raw_read,
    raw_write,
    read,
    write,
)
from holdfast.engine.tuning import ALIGNMENT, READING, SAVING, Tuning

__all__ = [
    "ALIGNMENT",
    "BACKENDS",
    "CHUNK_NBYTES",
    "READING",
    "SAVING",
    "Backend",
    "Capabilities",
    "Consumed",
    "Damage",
    "Destination",
    "Memory",
    "NativeShelf",
    "NativeShelfDamaged",
    "NativeShelfForeign",
    "NativeShelfFull",
    "NativeShelfNewer",
    "Packed",
    "Padding",
    "Produced",
    "ReadColumns",
    "ReadPiece",
    "Source",
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
    "empty_shelf",
    "fingerprints",
    "forks",
    "fresh_bytes",
    "huge_pages_given",
    "pack",
    "page_sizes",
    "raw_read",
    "raw_write",
    "read",
    "shelf_medium",
    "write",
    "write_back_instruction",
    "xxh3_64",
    "xxh3_64_each",
]
