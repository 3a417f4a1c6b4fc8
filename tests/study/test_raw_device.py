"""The bar that checkpoints are measured against."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from everystep_study.mechanisms import raw_device
from everystep_study.mechanisms.raw_device import raw_read, raw_write


@pytest.mark.parametrize("huge_pages", [False, True])
def test_every_byte_is_written_and_read_whatever_a_transfer_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge_pages: bool
) -> None:
    moved = {"pwritev": 0, "preadv": 0}

    def short(name: str) -> None:
        real = getattr(os, name)

        def move(file: int, buffers: list[memoryview], offset: int) -> int:
            count: int = real(file, [buffers[0][: 1 << 20]], offset)
            moved[name] += count
            return count

        monkeypatch.setattr(os, name, move)

    for name in moved:
        short(name)
    nbytes = raw_device.BUFFER_NBYTES + (9 << 20) + 5
    assert raw_write(tmp_path / "f", nbytes, huge_pages=huge_pages) > 0
    stored = np.fromfile(tmp_path / "f", np.uint8)
    assert len(stored) == nbytes // 4096 * 4096
    assert (stored == 0x5A).all()
    assert raw_read(tmp_path / "f", nbytes, huge_pages=huge_pages) > 0
    assert moved == {"pwritev": len(stored), "preadv": len(stored)}


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        raw_write(tmp_path / "f", 1 << 20)
    assert (tmp_path / "f").read_bytes() == b"precious"
