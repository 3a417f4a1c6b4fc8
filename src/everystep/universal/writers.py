"""The systems that can be written, one module each. The mirror image of `everystep.universal.readers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everystep.universal import native_target as native
from everystep.universal.dcp import target as dcp
from everystep.universal.deepspeed import universal_target as ds_universal
from everystep.universal.hf import target as hf
from everystep.universal.items import Job, OutputFile
from everystep.universal.megatron import target as megatron
from everystep.universal.safetensors import target as safetensors
from everystep.universal.torch_file import target as torch_save


@dataclass(frozen=True, slots=True)
class SystemWriter:
    """How a system is written.

    `kind` is its name, as ``--to`` takes it. `plan` tells the files that it will write, and their sizes.
    `write` writes them, all or nothing, durable on return; if ``job.verify``, it reads them back and compares
    before anything gets the name that the user asked for (the module's ``check(job, path)``). `prepare` comes
    before both: the job with other names or items, and what the user should know of it.

    `only_model`: it holds weights alone, as a rule. `inlines_bytes`: large ``bytes`` of the state are no
    arrays there. `cuts_parameters`: over the ranks of ``job.layout`` (``--tp``, ``--pp``), by the rules of
    ``job.spec``. `has_zero_stage`: it takes ``--zero-stage``. `keeps_types`: also those that only numpy has.
    `keeps_opaque`: also types of safetensors that no array has.
    """

    kind: str
    plan: Callable[[Job], list[OutputFile]]
    write: Callable[[Job], None]
    prepare: Callable[[Job], tuple[Job, tuple[str, ...]]] | None = None
    only_model: bool = False
    inlines_bytes: bool = False
    cuts_parameters: bool = False
    has_zero_stage: bool = False
    keeps_types: bool = False
    keeps_opaque: bool = False

    @property
    def needs_model(self) -> bool:
        return self.only_model or self.cuts_parameters


WRITERS: tuple[SystemWriter, ...] = (
    SystemWriter("everystep", native.plan, native.write, keeps_types=True),
    SystemWriter(safetensors.KIND, safetensors.plan, safetensors.write, only_model=True, keeps_opaque=True),
    SystemWriter(hf.KIND, hf.plan, hf.write, hf.prepare, only_model=True, keeps_opaque=True),
    SystemWriter(
        ds_universal.KIND,
        ds_universal.plan,
        ds_universal.write,
        inlines_bytes=True,
        cuts_parameters=True,
        has_zero_stage=True,
    ),
    SystemWriter("torch", torch_save.plan, torch_save.write, inlines_bytes=True),
    SystemWriter("dcp", dcp.plan, dcp.write, dcp.prepare, inlines_bytes=True),
    SystemWriter(megatron.KIND, megatron.plan, megatron.write, megatron.prepare, cuts_parameters=True),
)
