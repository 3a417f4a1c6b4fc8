"""One module per system: it knows where the bytes of that system's checkpoints lie, and reads no arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everystep.universal.dcp import hf_source as dcp_hf
from everystep.universal.dcp import source as dcp
from everystep.universal.deepspeed import source as deepspeed
from everystep.universal.deepspeed import universal_source as ds_universal
from everystep.universal.hdf5 import source as hdf5
from everystep.universal.hf import source as hf
from everystep.universal.megatron import core_source as megatron_core
from everystep.universal.megatron import source as megatron
from everystep.universal.npz import source as npz
from everystep.universal.safetensors import source as safetensors
from everystep.universal.source import Source
from everystep.universal.spec import Spec
from everystep.universal.torch_file import source as torch_save


@dataclass(frozen=True, slots=True)
class SystemReader:
    """How the checkpoints of a system are known and described.

    `kind` is its name, as ``--kind`` takes it, `wanted` the files that it looks for, in words. `looks_like`
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


READERS: tuple[SystemReader, ...] = (
    SystemReader(ds_universal.KIND, ds_universal.WANTED, ds_universal.looks_like, ds_universal.describe),
    SystemReader(
        deepspeed.KIND, deepspeed.WANTED, deepspeed.looks_like, deepspeed.describe, deepspeed.parameters
    ),
    SystemReader(megatron_core.KIND, megatron_core.WANTED, megatron_core.looks_like, megatron_core.describe),
    SystemReader(dcp.KIND, dcp.WANTED, dcp.looks_like, dcp.describe),
    SystemReader(dcp_hf.KIND, dcp_hf.WANTED, dcp_hf.looks_like, dcp_hf.describe),
    SystemReader(megatron.KIND, megatron.WANTED, megatron.looks_like, megatron.describe, megatron.parameters),
    SystemReader(npz.KIND, npz.WANTED, npz.looks_like, npz.describe),
    SystemReader(hdf5.KIND, hdf5.WANTED, hdf5.looks_like, hdf5.describe),
    SystemReader(torch_save.KIND, torch_save.WANTED, torch_save.looks_like, torch_save.describe),
    SystemReader(hf.KIND, hf.WANTED, hf.looks_like, hf.describe),
    SystemReader(safetensors.KIND, safetensors.WANTED, safetensors.looks_like, safetensors.describe),
)
"""The more specific ones come first: the first that recognises a path reads it."""
