"""The machine a benchmark runs on: its facts, its free disk and memory, and how busy others keep it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

from everystep_study.harness.costs import cpu_seconds
from everystep_study.harness.results import Machine, size


def look_for_room(directory: Path, disk_nbytes: int, memory_nbytes: int) -> None:
    """Raises unless the directory exists and so much disk and memory is free."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory: name one on the device to be measured")
    free = shutil.disk_usage(directory).free
    if free < disk_nbytes:
        raise OSError(
            f"{directory} has {size(free)} free and this benchmark needs {size(disk_nbytes)}: "
            "choose a smaller --size or another directory"
        )
    available = available_memory()
    if available < memory_nbytes:
        raise MemoryError(
            f"{size(available)} of memory are available and this benchmark needs {size(memory_nbytes)}: "
            "choose a smaller --size"
        )


def available_memory() -> int:
    """Bytes that processes can get without anything being swapped out."""
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine_facts(directory: Path, load_before: float, others_share: float | None) -> Machine:
    versions = {"python": platform.python_version()}
    for name in ("everystep", "numpy", "torch", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    kind = _filesystem(directory)
    return Machine(platform.platform(), cpu_count(), load_before, kind, versions, others_share)


def cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def others_cpu_seconds() -> float | None:
    """CPU time so far that was not spent on this process and its ended children; None if unknown."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal; what follows is part of the first two
    ticks = [int(word) for word in path.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - cpu_seconds(children=True)


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
