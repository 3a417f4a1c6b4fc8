"""Megatron's directories: ``iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt`` for each rank of a layout.

A spec says how each parameter is cut; without one, the preset ``megatron-gpt`` does. The optimizer's state is
cut as its parameter. Layers are cut over pipeline stages; what is named as an embedding goes to the first
stage, other parameters to the last. A padded vocabulary gets a multiple of
``make_vocab_size_divisible_by`` rows on each rank (128, if the source does not say).

`target_ranks` owns which tensor goes into which file.
"""

from __future__ import annotations

import os
from dataclasses import replace

from everystep.engine import fs
from everystep.errors import StateMismatch
from everystep.universal.atomic_output import output_directory, refuse_directory
from everystep.universal.foreign_checkpoint import ForeignCheckpoint
from everystep.universal.items import MODEL, Job, OutputFile, progress_of
from everystep.universal.megatron.target_ranks import OPTIMIZER, Ranks, state_name
from everystep.universal.readback import compare_copies, compare_written
from everystep.universal.recognition import describe
from everystep.universal.torch_file.writing import TorchFile, write_files

KIND = "megatron"
_LATEST = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"


def prepare(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job with the model and its optimizer's state only: Megatron's files have no place for more."""
    if not any(item.name.startswith(MODEL) for item in job.items):
        raise StateMismatch(
            f"{job.checkpoint.path}: no leaf is named {MODEL}*, so that there is no model to write"
        )
    parameters = {name for name in (*(item.name for item in job.items), *job.tied) if name.startswith(MODEL)}
    kept = [item for item in job.items if item.name.startswith((MODEL, OPTIMIZER))]
    tied = {name: of for name, of in job.tied.items() if name.startswith((MODEL, OPTIMIZER))}
    named = {name: state_name(name, parameters) for name in (*(item.name for item in kept), *tied)}
    items = tuple(replace(item, name=named[item.name]) for item in kept)
    return replace(job, items=items, tied={named[name]: named[of] for name, of in tied.items()}), ()


def plan(job: Job) -> list[OutputFile]:
    refuse_directory(job.path)
    latest = OutputFile(_LATEST, len(_latest(job)))
    return [latest, *(OutputFile(file.name, file.nbytes) for file in _files(job, Ranks(job)))]


def write(job: Job) -> None:
    files = _files(job, Ranks(job))
    with output_directory(job.path) as directory:
        write_files(job.checkpoint, directory, files, progress_of(job, sum(f.data_nbytes for f in files)))
        with fs.write_file(os.path.join(directory, _LATEST), _latest(job)) as small:
            fs.sync([small])
        if job.verify:
            check(job, directory)


def check(job: Job, path: str) -> None:
    with ForeignCheckpoint(describe(path, KIND, Ranks(job).spec)) as written:
        compare_copies(written)
        compare_written(job, written)


def _iteration(job: Job) -> str:
    return f"iter_{job.checkpoint.step:07d}"


def _latest(job: Job) -> bytes:
    return f"{job.checkpoint.step}\n".encode()


def _files(job: Job, ranks: Ranks) -> list[TorchFile]:
    found: list[TorchFile] = []
    for tensor_rank in range(job.layout.tp):
        for stage in range(job.layout.pp):
            folder = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if job.layout.pp > 1 else "")
            name = f"{_iteration(job)}/{folder}/{_FILE}"
            found.append(TorchFile(name, ranks.content(tensor_rank, stage)))
    return found
