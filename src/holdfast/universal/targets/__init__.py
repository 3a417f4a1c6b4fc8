"""One module per system that can be written. The mirror image of `holdfast.universal.sources`.

Each module has

- ``KIND``: its name, as ``--to`` takes it; ``ONLY_MODEL``: whether it holds weights alone, as a rule;
  ``INLINES_BYTES``: large ``bytes`` of the state are no arrays there,
- if need be, ``CUTS_PARAMETERS = True``: it cuts parameters over the ranks of ``job.layout`` (``--tp``,
  ``--pp``), by the rules of ``job.spec``; ``HAS_ZERO_STAGE = True``: it takes ``--zero-stage``,
- if need be, ``prepare(job)``: the job with other names or items, and what the user should know of it,
- ``plan(job)``: the files that it will write, and their sizes,
- ``write(job)``: writes them, all or nothing, durable on return; if ``job.verify``, it calls ``check`` before
  anything gets the name that the user asked for,
- ``check(job, path)``: reads back what was written to this hidden path, and raises if anything differs.
"""

from __future__ import annotations

from types import ModuleType

from holdfast.universal.targets import dcp, ds_universal, hf, megatron, native, safetensors, torch_save

TARGETS: tuple[ModuleType, ...] = (
    native,
    safetensors,
    hf,
    ds_universal,
    torch_save,
    dcp,
    megatron,
)
