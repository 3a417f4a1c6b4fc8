"""Builds the environments in which tests marked `peers` run other systems, for `make peers`.

    python tools/peers.py            all of them
    python tools/peers.py NAME...    these

Each is a virtual environment ``build/peers/NAME`` without holdfast. A stamp in it says what was installed: an
environment whose entry in the table has not changed is left as it is, any other is built from scratch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
_TESTING = "pytest==9.2.0 hypothesis pytest-timeout msgspec"  # for our own tests inside of an environment
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "deepspeed": (TORCH, "deepspeed==0.19.8 numpy==2.4.6 setuptools ninja"),
    "megatron-core": (TORCH, "megatron-core==0.16.1 numpy==2.4.6 packaging einops psutil"),
    "transformers": (TORCH, "transformers==5.23.0 accelerate==1.15.0 lightning==2.6.6 numpy==2.4.6"),
    "jax": ("jax==0.10.2 flax==0.12.8 optax==0.2.8 orbax-checkpoint==0.12.8 numpy==2.4.6",),
    "chainer": ("setuptools<60 wheel numpy==1.23.5", "--no-build-isolation chainer==7.8.1"),
    "keras": ("keras==3.15.1 jax==0.10.2 h5py==3.16.0 numpy==2.4.6",),
    "sklearn-oldest": ("scikit-learn==1.3.0 numpy==1.24.4 scipy==1.10.1", _TESTING),
    "sklearn-newest": ("scikit-learn==1.9.1 numpy==2.4.6 scipy==1.17.1", _TESTING),
}
"""What `pip install` gets, by name: one call for each entry, which keeps the versions of those before it.
Options of pip may be among them: Chainer is built with the old setuptools that it needs, not with a new one.

Torch comes first wherever it is needed, so that nothing else decides which one that is.
"""
FOLDER = Path(__file__).resolve().parent.parent / "build" / "peers"
STAMP = ".holdfast-peer"


def build(name: str) -> None:
    folder, steps = FOLDER / name, ENVIRONMENTS[name]
    wanted = "\n".join(steps)
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"peers: building {folder.relative_to(FOLDER.parent.parent)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    for index in range(len(steps)):
        requirements = " ".join(steps[: index + 1]).split()
        subprocess.run([*pip, "install", "--quiet", *requirements], check=True)
    stamp.write_text(wanted)


def main(names: list[str]) -> int:
    if unknown := set(names) - set(ENVIRONMENTS):
        print(
            f"peers: there are {', '.join(ENVIRONMENTS)}, not {', '.join(sorted(unknown))}", file=sys.stderr
        )
        return 2
    for name in names or ENVIRONMENTS:
        build(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
