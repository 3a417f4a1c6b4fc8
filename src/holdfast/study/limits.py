"""The device's own limit, read twice: by the engine's bare loop, and by fio where it is installed.

Both write the same number of bytes as the state has, from one aligned buffer, past the page cache, into a
file that is preallocated and synced at the end: what no checkpoint can beat on a fresh file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

from holdfast.study import results
from holdfast.study.peers import Done, Peer
from holdfast.study.states import State

_BLOCK = 1 << 20
_DEPTH = 32
_SECTOR = 4096
_FIO_TIMEOUT_SECONDS = 600


class RawDevice(Peer):
    """The engine's loop over one aligned buffer, timed by the engine from open to synced."""

    key = results.RAW
    title = "raw device limit"
    cost_is_ours = False  # most of it goes into making and filling the buffer
    huge_pages = False

    def __init__(self) -> None:
        self._nbytes = 0

    def missing(self) -> str | None:
        try:
            from holdfast.engine import raw_read, raw_write  # noqa: F401
        except ImportError as error:
            return f"the engine is not built ({error})"
        return None

    def save(self, path: Path, state: State) -> Done:
        from holdfast import engine

        self._nbytes = state.nbytes
        return Done(path, seconds=engine.raw_write(path, state.nbytes, huge_pages=self.huge_pages))

    def load(self, saved: Done) -> Done:
        from holdfast import engine

        return Done(saved.path, seconds=engine.raw_read(saved.path, self._nbytes, huge_pages=self.huge_pages))


class RawHugePages(RawDevice):
    """The same from huge pages: a device that gathers 4 KiB pieces one by one is faster with 2 MiB ones.

    No memory layout can beat this; the limit above is what memory as programs have it can reach.
    """

    key = results.RAW_HUGE
    title = "raw, huge pages"
    huge_pages = True


class Fio(Peer):
    """fio's sequential direct I/O. Its own clock is used: starting a process is not the device's doing."""

    key = results.FIO
    title = "fio (raw, again)"
    cost_is_ours = False  # it is a process of its own

    def __init__(self) -> None:
        self._program = shutil.which("fio")
        self._engine: str | None = None
        self._nbytes = 0

    def missing(self) -> str | None:
        return None if self._program else "apt install fio"

    def start(self, directory: Path, state: State) -> None:
        # Direct I/O moves whole sectors, and fio whole blocks: at least one of them.
        self._nbytes = max(_BLOCK, -(-state.nbytes // _SECTOR) * _SECTOR)
        # io_uring may be forbidden (containers), and which engines fio was built with varies.
        trial = directory / "fio-trial"
        problems = []
        for name in ("io_uring", "libaio"):
            try:
                self._run(trial, "write", name, _BLOCK)
            except RuntimeError as error:
                problems.append(str(error))
            else:
                self._engine = name
                return
            finally:
                trial.unlink(missing_ok=True)
        raise RuntimeError("; ".join(problems))

    def save(self, path: Path, state: State) -> Done:
        return self._measured(path, "write")

    def load(self, saved: Done) -> Done:
        return self._measured(saved.path, "read")

    def _measured(self, path: Path, kind: Literal["write", "read"]) -> Done:
        job = self._run(path, kind, str(self._engine), self._nbytes)
        # fio counts milliseconds (zero means less than one), and leaves out an incomplete last block.
        moved = int(job[kind]["io_bytes"])
        seconds = max(int(job["job_runtime"]), 1) / 1000 * (self._nbytes / moved)
        percent = float(job["usr_cpu"]) + float(job["sys_cpu"])
        return Done(path, seconds=seconds, cpu_seconds=seconds * percent / 100)

    def _run(self, path: Path, kind: Literal["write", "read"], engine: str, nbytes: int) -> dict[str, Any]:
        command = [
            str(self._program),
            f"--name={kind}",
            f"--filename={path}",
            f"--rw={kind}",
            f"--size={nbytes}",
            f"--bs={_BLOCK}",
            f"--iodepth={_DEPTH}",
            f"--ioengine={engine}",
            "--direct=1",
            "--end_fsync=1",
            "--output-format=json",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FIO_TIMEOUT_SECONDS, check=False
        )
        if done.returncode != 0:
            complaint = (done.stderr or done.stdout).strip().splitlines()
            raise RuntimeError(f"fio with {engine}: {complaint[-1] if complaint else 'no message'}")
        # Some versions put a remark before the JSON.
        document = json.loads(done.stdout[done.stdout.index("{") :])
        job: dict[str, Any] = document["jobs"][0]
        return job


def every_peer() -> tuple[Peer, ...]:
    """All systems, in the order of the table. Holdfast stands beside the limit it is held against, so that
    in every round the two are measured within moments of each other."""
    from holdfast.study import peers

    return (
        RawDevice(),
        peers.Holdfast(),
        peers.RecycledHoldfast(),
        RawHugePages(),
        Fio(),
        peers.Safetensors(),
        peers.TorchSaveWithoutCrc(),
        peers.TorchSave(),
        peers.DistributedCheckpoint(),
        peers.Pickle(),
        peers.Savez(),
    )
