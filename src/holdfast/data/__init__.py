"""Data that goes on where it stopped: the same samples in the same order, with the same random augmentation.

- `Loader`: a torch ``DataLoader`` for map-style datasets that is saved and restored with the rest of the
  state and continues in the middle of an epoch, without loading again what had been delivered.
- `resumable`: the same for a ``DataLoader`` that exists already.
- `Sampler`: the order of the samples by itself, for loops that do their own loading.

The rooms: `sampler` (the order of an epoch), `seeding` (random numbers that depend on the batch and nothing
else), `batches` (what runs in the workers), `orders` (batches by any sampler), `loader` (position
and iteration), `adopt` (loaders that exist). torch is imported when the first loader is made.
"""

from __future__ import annotations

from holdfast.data.adopt import resumable
from holdfast.data.loader import Loader
from holdfast.data.sampler import Sampler

__all__ = ["Loader", "Sampler", "resumable"]
