"""One module per system: it knows where the bytes of that system's checkpoints lie, and reads no arrays.

Each module has

- ``KIND``: its name, as ``--from`` takes it; ``WANTED``: the files it looks for, in words,
- ``looks_like(path)``: what was found that says that the checkpoint is of this system, or None. It must be
  quick, and must not raise for anything that exists,
- ``describe(path, spec)``: the `holdfast.universal.source.Source`.

A module of a system with several ranks joins them by a spec. It also has ``parameters(path)``: the names that
rules are asked for. Without it, the spec is applied to what `describe` gives.

`SOURCES` are asked in their order: the more particular ones first.
"""

from __future__ import annotations

from types import ModuleType

from holdfast.universal.sources import (
    dcp,
    dcp_hf,
    deepspeed,
    ds_universal,
    hdf5,
    hf,
    megatron,
    megatron_core,
    npz,
    safetensors,
    torch_save,
)

SOURCES: tuple[ModuleType, ...] = (
    ds_universal,
    deepspeed,
    megatron_core,
    dcp,
    dcp_hf,
    megatron,
    npz,
    hdf5,
    torch_save,
    hf,
    safetensors,
)
