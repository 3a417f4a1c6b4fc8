"""Where a benchmark runs: whether there is room for it, and what the machine is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

from holdfast.study.report import size
from holdfast.study.results import Machine


def look_for_room(directory: Path, what: str, disk_nbytes: int, memory_nbytes: int) -> None:
    """Raises unless the directory is there, and so much of disk and memory is free. `what` needs it."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory: name one on the device to be measured")
    free = shutil.disk_usage(directory).free
    if free < disk_nbytes:
        raise OSError(
            f"{directory} has {size(free)} free and {what} needs {size(disk_nbytes)}: "
            "choose a smaller --size or another directory"
        )
    available = available_memory()
    if available < memory_nbytes:
        raise MemoryError(
            f"{size(available)} of memory are available and {what} needs {size(memory_nbytes)}: "
            "choose a smaller --size"
        )


def available_memory() -> int:
    """Bytes that processes can get without anything being swapped out."""
    for line in _meminfo():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> list[str]:
    path = Path("/proc/meminfo")
    return path.read_text().splitlines() if path.exists() else []


def machine_facts(directory: Path, load_before: float) -> Machine:
    versions = {"python": platform.python_version()}
    for name in ("holdfast", "numpy", "torch", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(platform.platform(), cpus, load_before, _filesystem(directory), versions)


def _filesystem(directory: Path) -> str:
    """The type of the filesystem below `directory`: the mount with the longest path leading to it."""
    resolved = directory.resolve()
    best, kind = -1, "unknown filesystem"
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, point, filesystem, *_ = line.split(" ")
        mount = Path(point.replace("\\040", " "))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), filesystem
    return kind
