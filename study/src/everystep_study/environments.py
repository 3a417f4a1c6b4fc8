"""Virtual environments in which other systems run: what is in them, how they are made, where they are.

One table for all: the tests marked `peers` (``tools/peers.py`` builds into ``build/peers``) and the study
(``everystep study setup NAME`` builds into a cache folder). A stamp in each says what was installed: one
whose entry in the table has not changed is left as it is, any other is built from scratch.

No environment has Everystep in it. `bridge` makes a folder for PYTHONPATH with the Everystep that runs now.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import everystep

TORCH = "torch==2.13.0"
_TESTING = "pytest==9.2.0 hypothesis pytest-timeout msgspec"  # for our own tests inside of an environment
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "deepspeed": (TORCH, "deepspeed==0.19.8 numpy==2.4.6 setuptools ninja"),
    "megatron-core": (TORCH, "megatron-core==0.16.1 numpy==2.4.6 packaging einops psutil"),
    "transformers": (TORCH, "transformers==5.23.0 accelerate==1.15.0 lightning==2.6.6 numpy==2.4.6"),
    "jax": ("jax==0.10.2 flax==0.12.8 optax==0.2.8 orbax-checkpoint==0.12.8 numpy==2.4.6",),
    "chainer": ("setuptools<60 wheel numpy==1.23.5", "--no-build-isolation chainer==7.8.1 h5py==3.10.0"),
    "keras": (TORCH, "keras==3.15.1 jax==0.10.2 h5py==3.16.0 numpy==2.4.6"),
    "tensorflow": ("tensorflow-cpu==2.21.0 keras==3.15.1 numpy==2.4.6",),
    "sklearn-oldest": ("scikit-learn==1.3.0 numpy==1.24.4 scipy==1.10.1", _TESTING),
    "sklearn-newest": ("scikit-learn==1.9.1 numpy==2.4.6 scipy==1.17.1", _TESTING),
}
"""What `pip install` gets, by name: one call for each entry, which keeps the versions of those before it.

Torch comes first wherever it is needed, so that nothing else decides which one that is. Options of pip may be
among them: Chainer is built with the old setuptools that it needs, not with a new one.
"""
STAMP = ".everystep-peer"
FOLDER_VARIABLE = "EVERYSTEP_PEERS"
"""Names another folder that has the environments."""


def cache_folder() -> Path:
    """Where `everystep study setup` builds."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everystep" / "environments"


def interpreter(name: str) -> Path | None:
    """The Python of an environment that has been built, here or by `make peers`; None if there is none."""
    for folder in (cache_folder(), Path("build") / "peers"):
        python = folder.absolute() / name / "bin" / "python"
        if python.exists():
            return python
    return None


def build(name: str, folder: Path, say: Callable[[str], None]) -> Path:
    """Builds ``folder/name`` unless it is up to date; returns its Python."""
    place, steps = folder / name, ENVIRONMENTS[name]
    python = place / "bin" / "python"
    wanted = "\n".join(steps)
    stamp = place / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"building {place}")
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    for index in range(len(steps)):
        subprocess.run([*pip, *" ".join(steps[: index + 1]).split()], check=True)
    stamp.write_text(wanted)
    return python


def bridge(folder: Path) -> Path:
    """A folder for PYTHONPATH: this Everystep, its engine, msgspec, this package, and nothing else from here.

    It serves environments of the same Python version.
    """
    package = folder / "everystep"
    package.mkdir(parents=True)
    native = importlib.util.find_spec("everystep._native")
    found = set(Path(everystep.__file__).resolve().parent.iterdir())
    if native is not None and native.origin is not None:  # an editable install has it elsewhere
        found.add(Path(native.origin))
    for path in found:
        if path.name != "__pycache__" and not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    msgspec = importlib.import_module("msgspec").__file__
    assert msgspec is not None
    (folder / "msgspec").symlink_to(Path(msgspec).parent)
    (folder / "everystep_study").symlink_to(Path(__file__).resolve().parent)
    return folder
