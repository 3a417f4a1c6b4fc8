"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, with tensor, pipeline and expert parallelism.

Names, for a parameter ``p``:

- ``model.p``: the weight as it was trained with (for example BF16). ZeRO-3 stores only the FP32 master
  weight, so there ``model.p`` is that weight.
- ``optimizer.p.fp32``: the FP32 master weight. For ZeRO-3 it is an alias of ``model.p``: the bytes exist
  once.
- ``optimizer.p.<state>``: what the optimizer keeps, for example ``exp_avg`` and ``step``. A state that is no
  array of the group's length (the step) belongs to all parameters of its group, and each gets it.
- Buffers and frozen parameters are ``model.<name>``; tied parameters are aliases. Layers of a pipeline are
  named as `PipelineModule` does (``3.weight``, ``tied_modules.embed.weight``), experts by their number in the
  whole model.

Values: ``optimizer.param_groups`` (with names in place of numbers), ``lr_scheduler.*``, the counters, and the
client's own entries by their names.
"""

from __future__ import annotations

import os

from everystep.errors import CorruptCheckpoint
from everystep.universal.deepspeed.layout.files import list_files, tag_folder
from everystep.universal.deepspeed.layout.joined import KIND, OWN_KEYS, Checkpoint
from everystep.universal.deepspeed.names import CLASSES
from everystep.universal.source import Source
from everystep.universal.spec import Spec
from everystep.universal.whole_source import apply_spec, parameters_of

__all__ = ["CLASSES", "KIND", "OWN_KEYS", "WANTED", "describe", "looks_like", "parameters"]

WANTED = (
    "*_model_states.pt with *_optim_states.pt or layer_*-model_states.pt, or 'latest' beside their directory"
)


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found, or None if this is nothing that `describe` reads."""
    try:
        folder = tag_folder(os.path.abspath(path))
        files = list_files(folder)
    except (OSError, CorruptCheckpoint):
        return None
    tag = os.path.basename(folder)
    if files.layers and files.models:
        return f"a DeepSpeed pipeline checkpoint ({tag})"
    if files.optimizers:
        return f"a DeepSpeed ZeRO checkpoint ({tag})"
    # The universal layout has such files, too, and is read by another module.
    if files.models and not os.path.isdir(os.path.join(folder, "zero")):
        return f"a DeepSpeed checkpoint without ZeRO ({tag})"
    return None


def parameters(path: str | os.PathLike[str]) -> list[str]:
    """The names that a spec is asked for."""
    checkpoint = Checkpoint(os.path.abspath(path))
    if checkpoint.tensor_parallel > 1:
        return checkpoint.parameters()
    return parameters_of(checkpoint.describe(None))


def describe(
    path: str | os.PathLike[str], spec: Spec | None = None, as_training: bool | None = None
) -> Source:
    """The leaves and values of a checkpoint: the directory with ``latest``, or one of its tags.

    The ranks of tensor parallelism are joined by `spec`; without one, by the ``universal_checkpoint_info`` of
    the files. Where there is no tensor parallelism, parameters are whole, and a spec gives names and ties.
    """
    checkpoint = Checkpoint(os.path.abspath(path))
    if checkpoint.tensor_parallel > 1:
        return checkpoint.describe(spec)
    found = checkpoint.describe(None)
    return found if spec is None else apply_spec(found, spec)
