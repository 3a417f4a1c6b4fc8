"""For programs that are built on torch's own tools: Everystep underneath them, with nothing else changed.

`dcp` puts Everystep under ``torch.distributed.checkpoint``. Nothing here imports torch before it is used.
"""

from __future__ import annotations
