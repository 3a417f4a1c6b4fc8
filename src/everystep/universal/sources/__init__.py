"""One module per system: it knows where the bytes of that system's checkpoints lie, and reads no arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everystep.universal.source import Source
from everystep.universal.sources import (
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
from everystep.universal.spec import Spec


@dataclass(frozen=True, slots=True)
class Reader:
    """How the checkpoints of a system are known and described.

    `kind` is its name, as ``--from`` takes it, `wanted` the files that it looks for, in words. `looks_like`
    tells what was found at a path that says that the checkpoint is of this system, or None. It is quick, and
    does not raise for anything that exists.

    `describe` takes a path, a spec, and whether to arrange the state as that of a training; None leaves that
    to the reader. A system whose checkpoints are nothing else is always arranged.

    A system with several ranks joins them by a spec: it has `parameters`, the names that rules are asked for.
    Without it, the spec is applied to the whole parameters that `describe` gives.
    """

    kind: str
    wanted: str
    looks_like: Callable[[str], str | None]
    describe: Callable[[str, Spec | None, bool | None], Source]
    parameters: Callable[[str], list[str]] | None = None


READERS: tuple[Reader, ...] = (
    Reader(ds_universal.KIND, ds_universal.WANTED, ds_universal.looks_like, ds_universal.describe),
    Reader(deepspeed.KIND, deepspeed.WANTED, deepspeed.looks_like, deepspeed.describe, deepspeed.parameters),
    Reader(megatron_core.KIND, megatron_core.WANTED, megatron_core.looks_like, megatron_core.describe),
    Reader(dcp.KIND, dcp.WANTED, dcp.looks_like, dcp.describe),
    Reader(dcp_hf.KIND, dcp_hf.WANTED, dcp_hf.looks_like, dcp_hf.describe),
    Reader(megatron.KIND, megatron.WANTED, megatron.looks_like, megatron.describe, megatron.parameters),
    Reader(npz.KIND, npz.WANTED, npz.looks_like, npz.describe),
    Reader(hdf5.KIND, hdf5.WANTED, hdf5.looks_like, hdf5.describe),
    Reader(torch_save.KIND, torch_save.WANTED, torch_save.looks_like, torch_save.describe),
    Reader(hf.KIND, hf.WANTED, hf.looks_like, hf.describe),
    Reader(safetensors.KIND, safetensors.WANTED, safetensors.looks_like, safetensors.describe),
)
"""In the order in which they are asked: the more particular ones first."""
