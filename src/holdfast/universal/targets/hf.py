"""Hugging Face directories: shards with an index, as ``from_pretrained`` opens them, and carried files."""

from __future__ import annotations

import json
import os

from holdfast.engine import fs
from holdfast.inspect.safetensors_writer import SafetensorsFile
from holdfast.store.os_errors import open_stored, reading
from holdfast.universal.atomic_output import output_directory, refuse_directory
from holdfast.universal.items import Item, Job, OutputFile, advance
from holdfast.universal.readback import compare_with
from holdfast.universal.sources.hf import FILE, INDEX
from holdfast.universal.targets.safetensors import file_of

KIND = "hf"
INLINES_BYTES = False
ONLY_MODEL = True


def plan(job: Job) -> list[OutputFile]:
    refuse_directory(job.path)
    files = [OutputFile(name, file.nbytes) for name, file in _shards(job).items()]
    if len(files) > 1:
        files.append(OutputFile(INDEX, len(_index(job))))
    return files + [OutputFile(os.path.basename(file), os.path.getsize(file)) for file in job.carried]


def write(job: Job) -> None:
    shards = _shards(job)
    with output_directory(job.path) as directory:
        done = 0
        for name, file in shards.items():
            file.write(os.path.join(directory, name), advance(job, done))
            done += file.data_nbytes
        if len(shards) > 1:
            _write_small(os.path.join(directory, INDEX), _index(job))
        for path in job.carried:
            with reading(path), open_stored(path, path) as carried:
                data = carried.read()
            _write_small(os.path.join(directory, os.path.basename(path)), data)
        if job.verify:
            check(job, directory)


def check(job: Job, path: str) -> None:
    compare_with(job, path, KIND)


def _write_small(path: str, data: bytes) -> None:
    with fs.write_file(path, data) as file:
        fs.sync([file])


def _shards(job: Job) -> dict[str, SafetensorsFile]:
    groups = _groups(job)
    if len(groups) == 1:
        return {FILE: file_of(job, groups[0], job.tied)}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": file_of(job, group, {} if number > 1 else job.tied)
        for number, group in enumerate(groups, 1)
    }


def _groups(job: Job) -> list[tuple[Item, ...]]:
    """Items in their order, as many to a shard as fit; one that is too large has a shard to itself."""
    groups: list[list[Item]] = [[]]
    room = job.max_shard_nbytes
    for item in job.items:
        if groups[-1] and item.nbytes > room:
            groups.append([])
            room = job.max_shard_nbytes
        groups[-1].append(item)
        room -= item.nbytes
    return [tuple(group) for group in groups]


def _index(job: Job) -> bytes:
    placed = {entry: name for name, file in _shards(job).items() for entry in file.names}
    document = {"metadata": {"total_size": job.nbytes}, "weight_map": dict(sorted(placed.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"
