"""integrations: one folder for each framework, with its trainer on top of `Checkpointer`, `save` and `load`.

A folder imports its framework when it is imported itself or first used; nothing else of Everystep does. It
uses a `Checkpointer` by its public methods only.

| folder | what it is for |
|---|---|
| `lightning`, `transformers`, `accelerate`, `deepspeed` | trainings with torch |
| `jax`, `keras`, `tensorflow`, `chainer` | trainings with other frameworks |
| `sklearn` | fits that resume in their middle |
| `dcp` | storage for ``torch.distributed.checkpoint`` |
| `data` | loaders that resume inside an epoch |
| `shared` | what several of these need |
"""

from __future__ import annotations
