"""Hugging Face directories: shards with an index, as ``from_pretrained`` opens them, and config files.

``from_pretrained`` gives random weights to a parameter that it does not find. So names lose the prefixes of
wrappers, and must be those of the model that ``config.json`` names. A tied weight is written under one name
only if the config says that it is tied, and under all of its names otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from everystep.engine import fs
from everystep.store.read.read_errors import open_stored, reading
from everystep.store.stream.safetensors_writer import SafetensorsFile
from everystep.universal.atomic_output import output_directory, refuse_directory
from everystep.universal.hf.names import family_of, is_first, published
from everystep.universal.hf.source import CONFIG, FILE, INDEX, read_config
from everystep.universal.items import MODEL, Item, Job, OutputFile, advance
from everystep.universal.readback import compare_with
from everystep.universal.safetensors.target import file_of

KIND = "hf"
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEAD = "lm_head.weight"


def prepare(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job with the names that ``from_pretrained`` looks for, and what the user should know."""
    config = _config(job)
    found = config.get("model_type")
    kind = found if isinstance(found, str) else None
    given = [*(item.name for item in job.items), *job.tied]
    cut = len(job.prefix)
    short = published([name[cut:] for name in given], kind)
    if job.prefix or family_of(kind) is not None:
        names = {name: MODEL + short.names[name[cut:]] for name in given}
    else:
        names = {name: short.names[name[cut:]] for name in given}
    items: list[Item] = []
    tied: dict[str, str] = {}
    for item in job.items:
        alike = [names[item.name], *(names[name] for name, of in job.tied.items() if of == item.name)]
        kept = next((name for name in alike if is_first(name, kind)), None)
        if kept is None or config.get("tie_word_embeddings") is not True:
            items += [replace(item, name=name) for name in alike]
        else:
            items.append(replace(item, name=kept))
            tied.update({name: kept for name in alike if name != kept})
    made = replace(job, items=tuple(items), tied=tied)
    return made, tuple(_notes(made, config, kind, short.stripped))


def plan(job: Job) -> list[OutputFile]:
    refuse_directory(job.path)
    files = [OutputFile(name, file.nbytes) for name, file in _shards(job).items()]
    if len(files) > 1:
        files.append(OutputFile(INDEX, len(_index(job))))
    changed = _changed_config(job)
    for path in job.carried:
        name = os.path.basename(path)
        nbytes = os.path.getsize(path) if name != CONFIG or changed is None else len(changed)
        files.append(OutputFile(name, nbytes))
    return files


def write(job: Job) -> None:
    shards = _shards(job)
    changed = _changed_config(job)
    with output_directory(job.path) as directory:
        done = 0
        for name, file in shards.items():
            file.write(os.path.join(directory, name), advance(job, done))
            done += file.data_nbytes
        if len(shards) > 1:
            _write_small(os.path.join(directory, INDEX), _index(job))
        for path in job.carried:
            name = os.path.basename(path)
            if name == CONFIG and changed is not None:
                data = changed
            else:
                with reading(path), open_stored(path, path) as carried:
                    data = carried.read()
            _write_small(os.path.join(directory, name), data)
        if job.verify:
            check(job, directory)


def check(job: Job, path: str) -> None:
    compare_with(job, path, KIND)


def _notes(
    job: Job, config: Mapping[str, object], kind: str | None, stripped: tuple[str, ...]
) -> Iterator[str]:
    if stripped:
        yield f"names lost {', '.join(stripped)}"
    if not any(os.path.basename(path) == CONFIG for path in job.carried):
        yield f"there is no {CONFIG}, which from_pretrained needs: add it, or pass --copy-from DIR"
    elif family_of(kind) is None:
        shown = "no model type" if kind is None else f"the model type {kind!r}, which is not known"
        yield f"{CONFIG} has {shown}: whether the names are those of the model was not checked"
    elif config.get("tie_word_embeddings") is False and _has_head(config):
        names = [*(item.name for item in job.items), *job.tied]
        if not any(name.endswith(_HEAD) for name in names):
            yield f"there is no {_HEAD}, and {CONFIG} does not tie it: from_pretrained would make it random"


def _has_head(config: Mapping[str, object]) -> bool:
    """Whether the model is one with ``lm_head``."""
    made = config.get("architectures")
    return isinstance(made, list) and any(
        isinstance(name, str) and name.endswith(("ForCausalLM", "LMHeadModel")) for name in made
    )


def _config(job: Job) -> Mapping[str, object]:
    path = next((path for path in job.carried if os.path.basename(path) == CONFIG), None)
    return {} if path is None else read_config(path)


def _changed_config(job: Job) -> bytes | None:
    """The config with the type that the weights were cast to, as ``save_pretrained`` says it; else None."""
    infos = job.checkpoint._parts.leaf_infos
    casts = {item.dtype for item in job.items if infos[item.stored].dtype != item.dtype}
    config = dict(_config(job))
    said = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    if len(casts) != 1 or not said:
        return None
    config.update(dict.fromkeys(said, _TORCH_NAMES[casts.pop()]))
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def _write_small(path: str, data: bytes) -> None:
    with fs.write_file(path, data) as file:
        fs.sync([file])


def _shards(job: Job) -> dict[str, SafetensorsFile]:
    groups = _groups(job)
    if len(groups) == 1:
        return {FILE: _file(job, groups[0], job.tied)}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": _file(job, group, {} if number > 1 else job.tied)
        for number, group in enumerate(groups, 1)
    }


def _file(job: Job, items: tuple[Item, ...], tied: Mapping[str, str]) -> SafetensorsFile:
    # from_pretrained refuses files that say another framework, and the arrays may be numpy's.
    return file_of(job, items, tied, made_for="pt")


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
