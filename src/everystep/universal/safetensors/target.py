"""One safetensors file. The names of a model lose the prefix ``model.``, as other tools expect."""

from __future__ import annotations

from everystep.store.stream.safetensors_writer import FileEntry, SafetensorsFile
from everystep.universal.atomic_output import output_file, refuse_file
from everystep.universal.items import Item, Job, OutputFile, advance
from everystep.universal.readback import compare_with

KIND = "safetensors"


def plan(job: Job) -> list[OutputFile]:
    refuse_file(job.path, overwrite=job.overwrite)
    return [OutputFile("", _file(job).nbytes)]


def write(job: Job) -> None:
    with output_file(job.path, overwrite=job.overwrite) as path:
        _file(job).write(path, advance(job, 0))
        if job.verify:
            check(job, path)


def check(job: Job, path: str) -> None:
    compare_with(job, path, KIND)


def _file(job: Job) -> SafetensorsFile:
    return file_of(job, job.items, job.tied.items())


def file_of(job: Job, items: tuple[Item, ...], tied: object, made_for: str | None = None) -> SafetensorsFile:
    """A file with some of the items, whose names have lost their prefix."""
    cut = len(job.prefix)
    entries = [FileEntry(item.stored, item.name[cut:], item.dtype) for item in items]
    other = {name[cut:]: of[cut:] for name, of in dict(tied).items()}  # type: ignore[call-overload]
    return SafetensorsFile(job.checkpoint, entries, other, job.prefix, made_for)
