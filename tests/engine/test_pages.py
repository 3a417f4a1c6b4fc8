"""Sizes of pages come from the system: arm64 has pages of 16 or 64 KiB, and huge ones of 32 or 512 MiB."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everystep.engine import page_sizes
from support.crashes.forbidden_calls import run

SAYS = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def test_sizes_are_those_of_the_system() -> None:
    page, huge = page_sizes()
    assert page == os.sysconf("SC_PAGESIZE")
    assert huge % page == 0
    if SAYS.exists():
        assert huge == int(SAYS.read_text())


SCRIPT = """
libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, PRIVATE, BIND = 0x2_0000, (1 << 14) | (1 << 18), 1 << 12
said = sys.argv[1] + "/said"
with open(said, "w") as file:
    file.write(sys.argv[2])
if libc.unshare(NEW_MOUNTS) or libc.mount(None, b"/", None, ctypes.c_ulong(PRIVATE), None):
    sys.exit("cannot have mounts of its own")
assert libc.mount(said.encode(), sys.argv[3].encode(), None, ctypes.c_ulong(BIND), None) == 0

import numpy as np
from everystep import engine
from everystep.engine import ReadPiece, Memory, Tuning, WritePiece, fs
print(engine.page_sizes()[1])
rng = np.random.default_rng(1)
data = rng.integers(0, 256, 40 << 20, np.uint8)
path = sys.argv[1] + "/f"
# More than is staged at once, so that pages are touched ahead; and a huge page or less of staging.
for tuning in (Tuning("threads", 4 << 20, 8, 0), Tuning("threads", 64 << 10, 3, 0)):
    pieces = [WritePiece(0, Memory(data.ctypes.data, data.nbytes, data))]
    job = engine.write(path, data.nbytes, pieces, tuning=tuning, recycle=True)
    job.wait(100)
    fs.sync([job])
    for out in (engine.fresh_bytes(data.nbytes), np.zeros_like(data)):  # fresh memory and old
        piece = ReadPiece(0, Memory(out.ctypes.data, out.nbytes, out), job.checksums()[0])
        assert engine.read(path, [piece], tuning=tuning) == []
        assert np.array_equal(out, data)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not SAYS.exists(), reason="root alone may change what the kernel says"
)
@pytest.mark.parametrize(
    ("said", "taken"),
    [(32 << 20, 32 << 20), (512 << 20, 512 << 20), (12345, 2 << 20)],
    ids=["of 16 KiB pages", "of 64 KiB pages", "no power of two"],
)
def test_huge_pages_of_any_size(tmp_path: Path, said: int, taken: int) -> None:
    """What the kernel says is replaced, for a process of its own."""
    assert run(SCRIPT, tmp_path, said, SAYS) == str(taken)
