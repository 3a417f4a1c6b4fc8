"""Which mechanisms ``everystep bench`` compares, by the names of ``--system``, in the order of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everystep_study.mechanisms.mechanism import EverystepOverlap, EverystepSnapshot, EverystepSync, Mechanism
from everystep_study.mechanisms.plain import (
    EverystepSave,
    Pickle,
    RawDevice,
    RawHugePages,
    Recycling,
    Savez,
)
from everystep_study.mechanisms.torch_mechanisms import (
    CheckFreq,
    Dcp,
    DcpAsync,
    NoCheckpoints,
    Safetensors,
    TorchSave,
    TorchSaveWithoutCrc,
)

STORING: dict[str, type[Mechanism]] = {
    "raw": RawDevice,
    "everystep": EverystepSave,
    "everystep-recycled": Recycling,
    "raw-huge": RawHugePages,
    "safetensors": Safetensors,
    "torch-no-crc": TorchSaveWithoutCrc,
    "torch": TorchSave,
    "dcp": Dcp,
    "pickle": Pickle,
    "savez": Savez,
}
"""Everystep is next to the limit that it is compared with, so that in every round the two are measured within
moments of each other."""

TRAINING: dict[str, type[Mechanism]] = {
    "none": NoCheckpoints,
    "overlap": EverystepOverlap,
    "snapshot": EverystepSnapshot,
    "sync": EverystepSync,
    "checkfreq": CheckFreq,
    "dcp-async": DcpAsync,
    "torch": TorchSave,
}
"""Those that checkpoint a running training."""

WRITERS = "writers-"
"""``writers-2`` is a `Checkpointer` in which two ranks write."""


def storing(key: str) -> type[Mechanism]:
    if key.startswith(WRITERS):
        return type("Writers", (Recycling,), {"writers": int(key.removeprefix(WRITERS))})
    return STORING[key]


def choose(
    keys: Sequence[str], among: Mapping[str, type[Mechanism]], always: Sequence[str] = ()
) -> dict[str, type[Mechanism]]:
    """Those with these keys, in the order of the tables; all of them when none is named."""
    unknown = sorted(set(keys) - set(among))
    if unknown:
        raise ValueError(f"unknown system {', '.join(unknown)}; there are: {', '.join(among)}")
    return {key: kind for key, kind in among.items() if not keys or key in keys or key in always}
