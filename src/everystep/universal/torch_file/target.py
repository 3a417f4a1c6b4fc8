"""Files as ``torch.save`` writes them, which ``torch.load(weights_only=True)`` reads.

The weights of a model alone become a state dict, which ``load_state_dict`` takes. Anything else is a dict
with the keys of the state, and what another library wrote keeps its form.
"""

from __future__ import annotations

import os
from pickle import UnpicklingError
from typing import Any

from everystep.errors import SaveFailed
from everystep.state.torch_arrays import load_torch, torch_dtype
from everystep.universal.atomic_output import output_file, refuse_file
from everystep.universal.foreign_checkpoint import ForeignCheckpoint
from everystep.universal.items import Job, OutputFile, progress_of
from everystep.universal.readback import compare_arrays
from everystep.universal.torch_file.writing import TorchFile, pending_state, write_files


def plan(job: Job) -> list[OutputFile]:
    refuse_file(job.path, overwrite=job.overwrite)
    return [OutputFile("", _file(job).nbytes)]


def write(job: Job) -> None:
    file = _file(job)
    with output_file(job.path, overwrite=job.overwrite) as path:
        write_files(job.checkpoint, os.path.dirname(path), [file], progress_of(job))
        if job.verify:
            check(job, path)


def check(job: Job, path: str) -> None:
    """Reads the result with torch's own reader, and compares."""
    torch = load_torch()
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, ValueError, TypeError) as error:
        raise SaveFailed(f"torch cannot read what was written for {job.path}: {error}") from error
    tensors: dict[int, Any] = {}
    _find_tensors(torch, loaded, tensors)
    names = {item.stored: item.name for item in job.items}
    written = [names[tensor.origin.stored] for tensor in _file(job).tensors]
    if len(tensors) != len(written) or len(written) != len(job.items):
        raise SaveFailed(f"{job.path} does not hold {len(job.items)} tensors as it should")
    compare_arrays(job, dict(zip(written, tensors.values(), strict=True)))


def _file(job: Job) -> TorchFile:
    for item in job.items:
        torch_dtype(item.dtype)  # fails for a type that torch lacks
    state, _ = pending_state(job, keep_flags=True)
    if _is_state_dict(job) and isinstance(state, dict):
        state = state["model"]
    return TorchFile(os.path.basename(job.path), state, weights_only=True)


def _is_state_dict(job: Job) -> bool:
    checkpoint, tree = job.checkpoint, job.tree
    if isinstance(checkpoint, ForeignCheckpoint) and not checkpoint.source.arranged:
        return False  # what another library wrote keeps its form
    return bool(job.prefix) and isinstance(tree, dict) and list(tree) == ["model"]


def _find_tensors(torch: Any, value: Any, found: dict[int, Any]) -> None:
    """Every tensor once, in order, by its storage."""
    if isinstance(value, torch.Tensor):
        found.setdefault(value.untyped_storage()._cdata, value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in inside:
        _find_tensors(torch, item, found)
