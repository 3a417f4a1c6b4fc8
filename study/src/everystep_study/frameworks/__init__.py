"""The frameworks of the study, each in a process of its own.

| module | what it owns |
|---|---|
| this one | which frameworks there are |
| `api` | what a framework brings: models, steps, mechanisms; **how to add one** |
| `models` | the sizes of the models, the same in all, and their made-up data |
| `*_worker` | one framework each with its mechanisms; beside it its `*_models` and `*_probe` |
| `torch_training` | trainings in PyTorch, which ``everystep bench`` uses, too |
"""

from __future__ import annotations

from dataclasses import dataclass

from everystep_study.frameworks.models import MODELS

SUITES = ("cost", "formats", "scale", "determinism", "bitflips")


@dataclass(frozen=True, slots=True)
class FrameworkEntry:
    """A framework: its worker's module, its environment (None: this one), and the suites it takes part in."""

    title: str
    module: str
    environment: str | None = None
    suites: tuple[str, ...] = ("cost", "formats", "determinism", "bitflips")
    models: tuple[str, ...] = MODELS


_OF_TRAINERS = ("mlp", "gpt2")
"""Trainers and engines on top of PyTorch run the same models: a small and a large one will do."""

FRAMEWORKS: dict[str, FrameworkEntry] = {
    "torch": FrameworkEntry("PyTorch", "everystep_study.frameworks.torch_worker", suites=SUITES),
    "tensorflow": FrameworkEntry(
        "TensorFlow, Keras", "everystep_study.frameworks.tensorflow_worker", "tensorflow"
    ),
    "jax": FrameworkEntry("JAX", "everystep_study.frameworks.jax_worker", "jax"),
    "chainer": FrameworkEntry("Chainer", "everystep_study.frameworks.chainer_worker", "chainer"),
    "deepspeed": FrameworkEntry(
        "DeepSpeed",
        "everystep_study.frameworks.deepspeed_worker",
        "deepspeed",
        suites=("cost",),
        models=_OF_TRAINERS,
    ),
    "accelerate": FrameworkEntry(
        "accelerate",
        "everystep_study.frameworks.accelerate_worker",
        "transformers",
        suites=("cost",),
        models=_OF_TRAINERS,
    ),
    "transformers": FrameworkEntry(
        "transformers, Trainer",
        "everystep_study.frameworks.transformers_worker",
        "transformers",
        suites=("cost",),
        models=("gpt2",),
    ),
    "lightning": FrameworkEntry(
        "Lightning",
        "everystep_study.frameworks.lightning_worker",
        "transformers",
        suites=("cost",),
        models=_OF_TRAINERS,
    ),
}


def choose(names: str | None) -> dict[str, FrameworkEntry]:
    """Those that are named (``"torch,jax"``), or all; ValueError for one that does not exist."""
    wanted = FRAMEWORKS.keys() if names is None else [word.strip() for word in names.split(",")]
    unknown = [name for name in wanted if name not in FRAMEWORKS]
    if unknown:
        raise ValueError(f"there is no framework {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}")
    return {name: entry for name, entry in FRAMEWORKS.items() if name in wanted}
