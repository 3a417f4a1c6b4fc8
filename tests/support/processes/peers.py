"""Runs scripts in the environments of other systems, which `make peers` builds.

EVERYSTEP_PEERS may name another folder that has the environments of `everystep_study.environments`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import pytest

from everystep_study import environments

PROJECT = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ.get("EVERYSTEP_PEERS") or PROJECT / "build" / "peers")
"""Read when the tests start: each of them runs without variables EVERYSTEP_*."""
TIMEOUT_SECONDS = 300.0


def interpreter(name: str) -> Path:
    """The Python of an environment; the test fails if it has not been built."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python} is missing: run `make peers` or `python tools/peers.py {name}`", pytrace=False)
    return python


def run(
    name: str,
    *arguments: str | os.PathLike[str],
    ranks: int = 0,
    timeout: float = TIMEOUT_SECONDS,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    dies: bool = False,
) -> str:
    """Runs ``python ARGUMENTS`` in an environment, under torchrun if `ranks` are given; returns its output.

    If it fails or takes too long, the test fails with the end of the output, and no process stays behind.
    With `dies`, it must fail.
    """
    python = interpreter(name)
    command = [str(python)]
    if ranks:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--nnodes=1"]
        command += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    command += [os.fspath(argument) for argument in arguments]
    environment = {
        **os.environ,
        # Some systems compile small libraries with tools that they look for in PATH.
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(FOLDER / name / "torch-extensions"),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": "",
        **(env or {}),
    }
    started = time.time()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        _release_builds(Path(environment["TORCH_EXTENSIONS_DIR"]), started)
        pytest.fail(f"{' '.join(command)} took more than {timeout:g} s:\n{output[-4000:]}", pytrace=False)
    if bool(process.returncode) != dies:
        pytest.fail(f"{' '.join(command)} ended with {process.returncode}:\n{output[-6000:]}", pytrace=False)
    return output


def drill(name: str, script: Path, folder: Path, env: Mapping[str, str]) -> str:
    """Drills a script that runs in an environment; the command itself runs here. Returns its report."""
    command = [
        sys.executable,
        "-m",
        "everystep.cli",
        "drill",
        "--times",
        "3",
        "--workdir",
        str(folder / "drill"),
    ]
    done = subprocess.run(
        [*command, "--", str(interpreter(name)), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **env},
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def with_everystep(folder: Path) -> dict[str, str]:
    """Variables with which an environment finds the Everystep of this test run, and what it needs.

    The environments have Python and numpy as here, but not msgspec and no Everystep.
    """
    return {"PYTHONPATH": str(environments.bridge(folder))}


@lru_cache(maxsize=1)
def deepspeed_has_fp16() -> bool:
    """Whether DeepSpeed trains in fp16 here. On most processors it refuses to."""
    code = "from deepspeed.accelerator import get_accelerator as a; print('fp16:', a().is_fp16_supported())"
    return "fp16: True" in run("deepspeed", "-c", code)


def _release_builds(folder: Path, since: float) -> None:
    """Removes the lock files that a killed build has left, for which every later one would wait for ever."""
    for lock in folder.glob("*/lock"):
        if lock.stat().st_mtime >= since - 1:
            lock.unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
