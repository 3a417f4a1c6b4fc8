"""What this machine and a directory's filesystem can do: facts, measured speed, and advice from both."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from everystep import __version__, engine
from everystep.engine import READING, SAVING, fs
from everystep.errors import EngineUnavailable
from everystep.paths import local_path
from everystep.shelf.opening import medium_of_directory
from everystep.store.stream.progress import Progress, no_progress

SPEED_NBYTES = 256 << 20
"""Enough to see a device's speed, written and read `_REPEATS` times."""
_SYNCS = 20
_HASH_NBYTES = 64 << 20
_REPEATS = 3
_SLOW_RATE = 400e6
"""Bytes per second that no rotating disk exceeds."""
VOLATILE = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "9p", "afs", "beegfs"})
_UNSAFE_MOUNT = frozenset({"nobarrier", "barrier=0"})


@dataclass(frozen=True, slots=True)
class Mount:
    """The filesystem below a directory, as the kernel lists it.

    Attributes:
        kind: Its type, such as ``ext4``.
        point: Where it is mounted.
        source: The device, or what it was mounted from.
        options: Its mount options.
    """

    kind: str
    point: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """The block device below a filesystem.

    Attributes:
        name: Its name.
        rotational: Whether it is a rotating disk; None if that is not known.
        write_cache: Whether it may hold writes back until it is told to flush.
    """

    name: str
    rotational: bool | None
    write_cache: bool | None


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch that is installed.

    Attributes:
        version: Its version.
        cuda: Whether it sees a GPU; None if torch was not imported to ask.
        devices: The names of its GPUs.
    """

    version: str
    cuda: bool | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """How saves into the directory are written.

    Attributes:
        backend: The backend; None if none works.
        why: The reason.
    """

    backend: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured speed: medians.

    Attributes:
        nbytes: How much was written and read.
        write_seconds: How long writing took.
        read_seconds: How long reading took.
        sync_seconds: How long a sync takes.
        cached: The page cache took part, so these are not the speeds of the device.
    """

    nbytes: int
    write_seconds: float
    read_seconds: float
    sync_seconds: float
    cached: bool

    @property
    def write_rate(self) -> float:
        return self.nbytes / self.write_seconds


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        directory: The directory.
        everystep: The version of Everystep.
        python: The version of Python.
        kernel: The kernel and its version.
        cpus: How many CPUs this process may use.
        memory_nbytes: Memory of the machine.
        torch: The torch that is installed.
        nvidia: Whether there is an NVIDIA driver.
        mount: The filesystem below the directory.
        device: The device below that; None if it is not known.
        free_nbytes: Free space for this user.
        capabilities: What the engine can use there; None if the directory cannot be written.
        huge_pages: Whether the system gives huge pages.
        choice: How saves are written.
        hash_nbytes_per_second: How fast checksums are computed.
        shelf_medium: Where a shelf in this directory would live.
        speed: Measured speed; None if it was not measured.
        problems: Why saves here would fail.
        advice: What would help.
    """

    directory: str
    everystep: str
    python: str
    kernel: str
    cpus: int
    memory_nbytes: int
    torch: Torch | None
    nvidia: bool
    mount: Mount
    device: Device | None
    free_nbytes: int
    capabilities: engine.Capabilities | None
    huge_pages: bool
    choice: Choice
    hash_nbytes_per_second: float
    shelf_medium: str | None
    speed: Speed | None
    problems: tuple[str, ...]
    advice: tuple[str, ...]


def diagnose(
    directory: str | os.PathLike[str],
    *,
    speed_nbytes: int = SPEED_NBYTES,
    import_torch: bool = False,
    progress: Progress = no_progress,
) -> Diagnosis:
    """Examine the machine and the filesystem of a directory for checkpoints.

    Args:
        directory: The directory. Temporary files are written there.
        speed_nbytes: Write and read so many bytes three times to measure speed. 0 writes only a trial of
            direct I/O.
        import_torch: Import torch to ask it for GPUs.
        progress: Called with the bytes done so far, and the bytes in all.
    """
    where = local_path(directory)
    if not os.path.isdir(where):
        kind = NotADirectoryError if os.path.exists(where) else FileNotFoundError
        raise kind(None, "not a directory: name one on the device to look at", where)
    problems: list[str] = []
    able: engine.Capabilities | None = None
    try:
        able = engine.capabilities(where)
    except OSError as error:
        problems.append(f"cannot write here: {error.strerror or error}")
    choice = _choice(where, able, problems)
    free = _free_nbytes(where)
    speed = None
    if speed_nbytes and able is not None and choice.backend is not None:
        if free < 2 * speed_nbytes:
            problems.append("too little free space to measure speed, or to save much")
        else:
            speed = _measure(where, speed_nbytes, choice.backend, progress)
    mount, device, torch = find_mount(where), find_device(where), _torch(import_torch)
    huge_pages = engine.huge_pages_given()
    return Diagnosis(
        directory=where,
        everystep=__version__,
        python=platform.python_version(),
        kernel=f"{platform.system()} {platform.release()} ({platform.machine()})",
        cpus=len(os.sched_getaffinity(0)),
        memory_nbytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        torch=torch,
        nvidia=os.path.exists("/dev/nvidiactl"),
        mount=mount,
        device=device,
        free_nbytes=free,
        capabilities=able,
        huge_pages=huge_pages,
        choice=choice,
        hash_nbytes_per_second=_hash_speed(),
        shelf_medium=None if able is None else medium_of_directory(where),
        speed=speed,
        problems=tuple(problems),
        advice=tuple(_advice(mount, device, able, huge_pages, choice, speed)),
    )


def _choice(where: str, able: engine.Capabilities | None, problems: list[str]) -> Choice:
    forced = os.environ.get("EVERYSTEP_BACKEND")
    if able is None:
        return Choice(None, "the directory cannot be written")
    try:
        backend = engine.choose_backend(where)
    except EngineUnavailable as error:
        problems.append(f"EVERYSTEP_BACKEND={forced}: {error}")
        return Choice(None, f"EVERYSTEP_BACKEND={forced} cannot be used here")
    if forced:
        itself = "as it would be by itself" if backend == able.best else f"by itself it would be {able.best}"
        return Choice(backend, f"set by EVERYSTEP_BACKEND; {itself}")
    why = {
        "uring": "direct I/O and io_uring both work here",
        "threads": f"direct I/O works, io_uring does not ({able.uring_reason})",
        "buffered": f"no direct I/O here ({able.direct_reason})",
    }
    return Choice(backend, why[backend])


def _advice(
    mount: Mount,
    device: Device | None,
    able: engine.Capabilities | None,
    huge_pages: bool,
    choice: Choice,
    speed: Speed | None,
) -> Iterator[str]:
    yield from mount_advice(mount)
    # Virtual disks often claim to rotate; the speed tells.
    if device is not None and device.rotational and speed is not None and speed.write_rate < _SLOW_RATE:
        yield "a rotating disk: keep checkpoints on an SSD where there is one."
    if able is not None and able.direct and not able.uring:
        yield f"io_uring would save CPU time, but is not available: {able.uring_reason}."
    if able is not None and able.direct and not huge_pages:
        yield (
            "no huge pages, through which saves and restores would be up to twice as fast: write madvise to "
            "/sys/kernel/mm/transparent_hugepage/enabled."
        )
    if able is not None and choice.backend is not None and choice.backend != able.best:
        yield f"unset EVERYSTEP_BACKEND to use {able.best}, the best that works here."
    if speed is not None and speed.sync_seconds > 0.05:
        yield "a sync takes long here: save less often than every step, or choose another device."


def mount_advice(mount: Mount) -> Iterator[str]:
    """Warnings about a file system, by its kind and options."""
    if mount.kind in VOLATILE:
        yield f"{mount.kind} lives in memory: nothing saved here survives a power cut. Choose a disk."
    if mount.kind in NETWORK:
        yield f"{mount.kind} is a network filesystem: durability is what its server makes of a sync."
    if _UNSAFE_MOUNT.intersection(mount.options):
        yield "mounted without write barriers: a sync does not reach the device. Remount with barriers."


def find_mount(where: str) -> Mount:
    """The mount with the longest path that leads to a directory; later ones hide earlier ones."""
    resolved = Path(where).resolve()
    best = Mount("unknown", "/", "unknown", ())
    longest = -1
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as lines,
    ):
        for line in lines:
            source, point, kind, options, *_ = line.split(" ")
            path = Path(point.encode("utf-8", "surrogateescape").decode("unicode_escape", "surrogateescape"))
            if resolved.is_relative_to(path) and len(path.parts) >= longest:
                longest = len(path.parts)
                best = Mount(kind, str(path), source, tuple(options.split(",")))
    return best


def find_device(where: str) -> Device | None:
    """None for filesystems without a block device of their own (tmpfs, network)."""
    number = os.stat(where).st_dev
    base = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not base.exists():
        return None
    resolved = base.resolve()
    # A partition has no queue; the disk around it does.
    queue = next((path / "queue" for path in (resolved, resolved.parent) if (path / "queue").is_dir()), None)
    rotational = _text(queue / "rotational") if queue is not None else None
    cache = _text(queue / "write_cache") if queue is not None else None
    return Device(
        resolved.name,
        None if rotational is None else rotational == "1",
        None if cache is None else cache == "write back",
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _free_nbytes(where: str) -> int:
    found = os.statvfs(where)
    return found.f_bavail * found.f_frsize


def _torch(import_it: bool) -> Torch | None:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if not import_it:
        return Torch(version)
    import torch

    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Torch(str(torch.__version__), torch.cuda.is_available(), names)


def _hash_speed() -> float:
    data = bytes(_HASH_NBYTES)
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        engine.xxh3_64(data)
        seconds.append(time.perf_counter() - began)
    return _HASH_NBYTES / min(seconds)


def _measure(where: str, nbytes: int, backend: str, progress: Progress) -> Speed:
    """Interleaved, so that a device that is busy for a while slows down both."""
    chosen = next(name for name in engine.BACKENDS if name == backend)
    saving, reading = replace(SAVING, backend=chosen), replace(READING, backend=chosen)
    path = os.path.join(where, f".everystep-doctor-{uuid.uuid4().hex[:12]}")
    data = engine.fresh_bytes(nbytes)
    data[:] = 0x5A
    memory = engine.Memory(data.ctypes.data, nbytes, data)
    writes, reads = [], []
    total = 2 * _REPEATS * nbytes
    try:
        for number in range(_REPEATS):
            began = time.perf_counter()
            with engine.write(path, nbytes, [engine.WritePiece(0, memory)], tuning=saving) as job:
                job.wait()
                fs.sync([job])
            writes.append(time.perf_counter() - began)
            progress((2 * number + 1) * nbytes, total)
            began = time.perf_counter()
            engine.read(path, [engine.ReadPiece(0, memory)], tuning=reading, verify=False)
            reads.append(time.perf_counter() - began)
            progress((2 * number + 2) * nbytes, total)
            fs.unlink(path)
        syncs = list(_syncs(path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)
    return Speed(
        nbytes,
        statistics.median(writes),
        statistics.median(reads),
        statistics.median(syncs),
        backend == "buffered",
    )


def _syncs(path: str) -> Iterator[float]:
    """Seconds until 4 KiB that were overwritten are durable."""
    file = fs.NewFile(path)
    try:
        block = os.urandom(4096)
        file.write(0, block)
        file.sync()
        for _ in range(_SYNCS):
            began = time.perf_counter()
            file.write(0, block)
            file.sync()
            yield time.perf_counter() - began
    finally:
        file.close()
