"""An ext4 of its own in a file, and copies of that file as a power cut would leave it.

A copy holds what the device has at one moment. What only the page cache of the mounted file system has is not
in it. It is good when the device wrote nothing while it was made: the kernel counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IMAGE_NBYTES = 128 << 20
TOOLS = ("mkfs.ext4", "e2fsck", "mount", "umount")
_BLOCK = 1 << 20
_ZEROS = bytes(_BLOCK)


def why_not() -> str | None:
    """Why there can be no images here."""
    if os.geteuid() != 0:
        return "only root may mount"
    missing = [
        tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    if missing:
        return f"{', '.join(missing)}: not installed"
    return None if os.path.exists("/dev/loop-control") else "there are no loop devices"


def run(*command: str | os.PathLike[str], good: tuple[int, ...] = (0,)) -> str:
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode in good, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Journal:
    """How ext4 keeps its promises; None: it has no journal."""

    data: str | None

    def format(self, image: Path) -> None:
        with open(image, "xb") as file:
            file.truncate(IMAGE_NBYTES)
        journal = ["-O", "^has_journal"] if self.data is None else ["-J", "size=16"]
        # All at once: nothing is to be written behind our back later.
        run(
            "mkfs.ext4", "-q", "-F", *journal, "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", image
        )

    @property
    def options(self) -> str:
        # Commits of its own every second, so that copies find it in more states.
        return "loop" if self.data is None else f"loop,data={self.data},commit=1"


@contextlib.contextmanager
def mounted(image: Path, where: Path, options: str) -> Iterator[Path]:
    """Unmounts, and lets go of the loop device, whatever happens."""
    where.mkdir(exist_ok=True)
    run("mount", "-t", "ext4", "-o", options, image, where)
    try:
        yield where
    finally:
        for _ in range(50):
            try:
                run("umount", where)
                break
            except AssertionError:  # a process that was just killed may not have let go
                time.sleep(0.1)
        else:
            run("umount", "--lazy", where)


def device_under(where: Path) -> Path:
    """What the kernel says about the device of a mounted file system."""
    number = os.stat(where).st_dev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")


def copy_if_still(image: Path, copy: Path, device: Path) -> bool:
    """Copies an image unless the device writes meanwhile: then the copy would be of no single moment."""
    before = _written(device)
    with open(image, "rb") as source, open(copy, "wb") as target:
        # All of it is read: where the kernel sees a hole there may be bytes on their way to its disk.
        for offset in range(0, IMAGE_NBYTES, _BLOCK):
            block = source.read(_BLOCK)
            if block != _ZEROS:
                target.seek(offset)
                target.write(block)
        target.truncate(IMAGE_NBYTES)
    return before is not None and before == _written(device)


def _written(device: Path) -> tuple[int, ...] | None:
    """Writes, sectors written and flushes so far; None while some are under way."""
    _, writing = map(int, (device / "inflight").read_text().split())
    counts = [int(word) for word in (device / "stat").read_text().split()]
    return None if writing else (counts[4], counts[6], *counts[15:16])


def repair(image: Path) -> None:
    """What a machine does before it mounts: replay the journal, and mend what can be mended by itself."""
    run("e2fsck", "-f", "-y", image, good=(0, 1))
    run("e2fsck", "-f", "-n", image)


SYNCS = {"x86_64": (74, 75), "aarch64": (82, 83)}
"""The numbers of `fsync` and `fdatasync`."""


def ignore_syncs() -> None:
    """From now on both do nothing in this process, and say that all is well: a planted bug."""
    libc = ctypes.CDLL(None, use_errno=True)
    fsync, fdatasync = SYNCS[platform.machine()]
    # Load the number of the call; one of the two: succeed without doing it; all others: allow.
    rules = [(0x20, 0, 0, 0), (0x15, 1, 0, fsync), (0x15, 0, 1, fdatasync), (0x06, 0, 0, 0x00050000)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in [*rules, (0x06, 0, 0, 0x7FFF0000)])
    filter = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(filter)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
