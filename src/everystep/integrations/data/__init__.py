"""Data that continues where it stopped: the same samples, order and random augmentation.

- `Loader`: a torch ``DataLoader`` for map-style datasets. It is saved and restored with the rest of the state
  and continues inside an epoch, without loading delivered samples again.
- `resumable`: the same for an existing ``DataLoader``.
- `Sampler`: only the order of the samples, for loops that do their own loading.

| module | what it owns |
|---|---|
| `sampler` | the order of an epoch |
| `seeding` | random numbers that depend on the batch and nothing else |
| `batches` | what runs in the workers |
| `orders` | batches by any sampler |
| `loader` | position and iteration |
| `adopt` | existing loaders |

torch is imported when the first loader is made.
"""

from __future__ import annotations

from everystep.integrations.data.adopt import resumable
from everystep.integrations.data.loader import Loader
from everystep.integrations.data.sampler import Sampler

__all__ = ["Loader", "Sampler", "resumable"]
