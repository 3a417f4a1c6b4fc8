"""For programs that are built on torch's own tools: Holdfast underneath them, with nothing else changed.

`dcp` puts Holdfast under ``torch.distributed.checkpoint``. Nothing here imports torch before it is used.
"""

from __future__ import annotations
