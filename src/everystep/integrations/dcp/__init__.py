"""Everystep under ``torch.distributed.checkpoint``: hand `Writer` to its ``save``, `Reader` to its ``load``.

    import torch.distributed.checkpoint as dcp
    from everystep.integrations.dcp import Reader, Writer

    dcp.save(state, storage_writer=Writer("runs/x/step-000000000100"))
    dcp.load(state, storage_reader=Reader("runs/x/step-000000000100"))

DCP's planners decide what is saved and who writes it, and its process group carries what ranks tell each
other. The files, and how they become durable, are Everystep's: they make a checkpoint like any other.

The modules: `writer` and `reader` (DCP's two protocols), `dcp_save` (a save between DCP's calls), `paths`
(where checkpoints may be), `ignored_arguments` (what DCP's own writer and reader are tuned by). Importing
this does not import torch.
"""

from __future__ import annotations

from everystep.integrations.dcp.reader import Reader
from everystep.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
