"""integrations: one folder for each framework, with its trainer on top of `Checkpointer`, `save` and `load`.

`lightning`, `transformers`, `accelerate`, `deepspeed`, `jax`, `keras`, `tensorflow`, `chainer`, `sklearn`:
each imports its framework when it is imported itself; nothing else of Everystep does. `dcp` is storage for
``torch.distributed.checkpoint``. `data` has loaders that resume inside an epoch. `shared` is what several of
them need and nobody else does.
"""

from __future__ import annotations
