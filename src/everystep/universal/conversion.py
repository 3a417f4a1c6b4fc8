"""`convert`: a checkpoint of any known system as one of another, streamed, all or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from everystep.errors import CheckpointExists, SpecError, UnsupportedSource
from everystep.format.dtypes import opaque
from everystep.paths import local_path
from everystep.state.node import Node, blob_names, localized, pairs_of
from everystep.store import Options, checked_options
from everystep.store.read.checkpoint import Checkpoint, open_newest
from everystep.store.stream.progress import Progress, no_progress
from everystep.universal.atomic_output import sweep
from everystep.universal.foreign_checkpoint import ForeignCheckpoint
from everystep.universal.hf.source import carried_files
from everystep.universal.items import Item, Job, OutputFile, choose, items_of, tree_of, type_named
from everystep.universal.readback import compare_copies
from everystep.universal.recognition import describe, find_reader, reader_of
from everystep.universal.spec import Spec
from everystep.universal.split import TargetLayout
from everystep.universal.writers import WRITERS, SystemWriter

_BY_SUFFIX = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
_OF_OTHERS = frozenset(
    (
        ".gguf",
        ".h5",
        ".hdf5",
        ".keras",
        ".msgpack",
        ".npy",
        ".npz",
        ".onnx",
        ".pickle",
        ".pkl",
        ".tar",
        ".zip",
    )
)
"""Endings of files that Everystep cannot write. Without this list it would make a directory of that name."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` wrote, or would write.

    Attributes:
        source: The path that was read.
        kind: The system that wrote it.
        path: The path that was written.
        to: The system it was written for.
        step: The source's step; None if it states none.
        leaves: How many leaves were written.
        nbytes: Their bytes.
        files: The files, and their sizes.
        left_out: How many leaves of the source were not written.
        tied: How many further names the written leaves have.
        casts: How many leaves have another type than in the source.
        verified: Whether the result was read again and compared.
        dry_run: Whether nothing was written.
        notes: What the user should know.
    """

    source: str
    kind: str
    path: str
    to: str
    step: int | None
    leaves: int
    nbytes: int
    files: tuple[OutputFile, ...]
    left_out: int
    tied: int
    casts: int
    verified: bool
    dry_run: bool
    notes: tuple[str, ...] = ()


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    kind: str = "auto",
    spec: Spec | str | os.PathLike[str] | None = None,
    to: str | None = None,
    select: str | Iterable[str] | None = None,
    dtype: str | None = None,
    verify: bool = True,
    dry_run: bool = False,
    overwrite: bool = False,
    max_shard_nbytes: int = 5_000_000_000,
    copy_from: str | os.PathLike[str] | None = None,
    tp: int = 1,
    pp: int = 1,
    zero_stage: int | None = None,
    as_training: bool | None = None,
    options: Options | None = None,
    progress: Progress = no_progress,
) -> Converted:
    """Writes the checkpoint at `src` as one of another system at `dst`, durable on return.

    `dst` appears whole or not at all. Memory is bounded by `options.memory_nbytes` and the largest computed
    leaf, however large the checkpoint is.

    Args:
        src: The checkpoint to read: a file or a directory.
        dst: The path to write.
        kind: The system that wrote `src`. By default its files say it.
        spec: How `src` lays out its parameters, or the path of such a file (docs/universal-spec.md). If `src`
            has whole parameters and the target cuts them, how the target does.
        to: ``everystep``, ``safetensors``, ``hf``, ``torch``, ``dcp``, ``ds-universal`` or ``megatron``. By
            default what the end of `dst` says, else ``everystep``.
        select: Globs of leaves. By default all, and for a target that holds weights alone those of the model,
            whose names lose ``model.`` there.
        dtype: The type to cast floating-point leaves to, except an optimizer's.
        verify: Read both sides again and compare them before `dst` appears. False saves that time.
        dry_run: Write nothing, and return what would be written.
        overwrite: Replace a file or an Everystep checkpoint at `dst`. A directory of another kind stays.
        max_shard_nbytes: The size at which a target with several files begins the next one.
        copy_from: A ``config.json``, or a directory with it and a tokenizer, for a Hugging Face target. Those
            of a Hugging Face source are copied anyway.
        tp: Into how many tensor-parallel ranks the target cuts the parameters, if it does.
        pp: Into how many pipeline stages.
        zero_stage: The stage of ZeRO that DeepSpeed will load the result with.
        as_training: Whether to arrange what `src` has into ``model`` and ``optimizer`` (docs/universal.md).
            By default it is arranged where the target or `dtype` needs to know the model; else the result has
            what the system's own library loads.
        options: Memory and other settings.
        progress: Called with the bytes done and the bytes in all.

    >>> import everystep, numpy, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> numpy.savez(f"{folder}/a.npz", w=numpy.arange(3))
    >>> everystep.universal.convert(f"{folder}/a.npz", f"{folder}/a").leaves
    1
    >>> everystep.load(f"{folder}/a")
    {'w': array([0, 1, 2])}
    """
    target = local_path(dst)
    writer = _writer(to, target)
    cast = type_named(dtype)
    layout = _layout(writer, tp, pp, zero_stage)
    settings = checked_options(options) or Options()
    if max_shard_nbytes <= 0:
        raise ValueError(f"max_shard_nbytes must be positive, not {max_shard_nbytes}")
    if not dry_run:
        sweep(target)
    rules = Spec.load(spec) if spec is not None and not isinstance(spec, Spec) else spec
    with _open(src, kind, rules, settings, cuts=writer.cuts_parameters) as checkpoint:
        _refuse_source(checkpoint, target)
        if isinstance(checkpoint, ForeignCheckpoint):
            checkpoint._arrange(_view(checkpoint, writer, cast, rules, as_training))
        whole = select is None and not writer.only_model
        names = choose(checkpoint, select, only_model=writer.only_model, local=whole)
        tree = tree_of(checkpoint, names, whole=whole)
        local = checkpoint._parts.local(0) if whole else {}
        inlined = set(blob_names(localized(tree, local))) if writer.inlines_bytes else set()
        written = [name for name in names if name not in inlined]
        items, tied = items_of(checkpoint, written, cast, big_endian=writer.keeps_types)
        _refuse_opaque(checkpoint, items, writer)
        if whole and writer.kind == "torch" and target.endswith(".ckpt"):
            _refuse_arranged_lightning(checkpoint.path, tree)
        foreign = isinstance(checkpoint, ForeignCheckpoint)
        job = Job(
            checkpoint=checkpoint,
            path=target,
            items=items,
            tied=tied,
            tree=tree,
            local=local,
            overwrite=overwrite,
            verify=verify,
            max_shard_nbytes=max_shard_nbytes,
            carried=_carried(checkpoint, copy_from),
            layout=layout,
            spec=rules,
            zero_stage=zero_stage,
            tuning=settings.tuning(),
            progress=progress,
        )
        notes: tuple[str, ...] = ()
        if writer.prepare is not None:
            job, notes = writer.prepare(job)
        files = writer.plan(job)
        if not dry_run:
            compare_copies(checkpoint)
            writer.write(job)
        return Converted(
            source=checkpoint.path,
            kind=checkpoint._parts.root.format if foreign else "everystep",
            path=target,
            to=writer.kind,
            step=checkpoint._stated_step,
            leaves=len(job.items),
            nbytes=job.nbytes,
            files=tuple(files),
            left_out=len(checkpoint._parts.leaf_infos) - len(job.items) - len(job.tied) - len(inlined),
            tied=len(job.tied),
            casts=sum(checkpoint._parts.leaf_infos[item.stored].dtype != item.dtype for item in job.items),
            verified=verify and not dry_run,
            dry_run=dry_run,
            notes=notes,
        )


def target_kinds() -> list[str]:
    """The names of the systems that can be written."""
    return [writer.kind for writer in WRITERS]


def _writer(to: str | None, path: str) -> SystemWriter:
    suffix = os.path.splitext(path)[1]
    if to is None and suffix in _OF_OTHERS:
        known = ", ".join(_BY_SUFFIX)
        raise ValueError(
            f"{suffix} files cannot be written. Known endings are {known}; without one, the target is a "
            f"directory. If this is to be a directory, say of which kind ({', '.join(target_kinds())})"
        )
    kind = to or _BY_SUFFIX.get(suffix, "everystep")
    for writer in WRITERS:
        if writer.kind == kind:
            return writer
    raise ValueError(f"unknown target {kind!r}: known are {', '.join(target_kinds())}")


def _layout(writer: SystemWriter, tp: int, pp: int, zero_stage: int | None) -> TargetLayout:
    for name, number in (("tp", tp), ("pp", pp)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if (tp, pp) != (1, 1) and not writer.cuts_parameters:
        known = ", ".join(other.kind for other in WRITERS if other.cuts_parameters)
        raise ValueError(
            f"{writer.kind} holds whole parameters, so tp and pp must be 1; targets that cut them: {known}"
        )
    if zero_stage is not None and not writer.has_zero_stage:
        raise ValueError(f"zero_stage is for targets that DeepSpeed loads, not for {writer.kind}")
    if zero_stage not in (None, 1, 2, 3):
        raise ValueError(f"zero_stage must be 1, 2 or 3, not {zero_stage}")
    return TargetLayout(tp=tp, pp=pp)


def _open(
    src: str | os.PathLike[str], kind: str, spec: Spec | None, options: Options, *, cuts: bool
) -> Checkpoint:
    """The source. A spec tells how a foreign one is laid out; for a target that cuts, also how to cut."""
    if spec is not None and not (cuts and _is_whole(src, kind)):
        if kind == "everystep":
            raise SpecError("a spec is for checkpoints of other systems; Everystep's own need none")
        return ForeignCheckpoint(describe(src, kind, spec), options.reading())
    if kind in ("auto", "everystep"):
        opened = open_newest(src, options.reading())
        if kind == "everystep" and isinstance(opened, ForeignCheckpoint):
            path, found = opened.path, opened._parts.root.format
            opened.close()
            raise UnsupportedSource(f"{path} is a checkpoint of kind {found!r}, not of Everystep")
        return opened
    return ForeignCheckpoint(describe(src, kind), options.reading())


def _view(
    checkpoint: ForeignCheckpoint,
    writer: SystemWriter,
    cast: str | None,
    spec: Spec | None,
    asked: bool | None,
) -> bool | None:
    """Whether the source is arranged as a training state; None leaves it as its reader does."""
    if spec is not None:
        if asked is False:
            raise ValueError(
                "a spec is about the parameters of a model: as_training=False does not go with it"
            )
        return None
    if asked is not None:
        return asked
    if writer.needs_model or cast is not None:
        return True
    # What Lightning loads has its own entries, so a torch file of a torch file keeps them.
    keeps = writer.kind == checkpoint.source.kind == "torch" and os.path.isfile(checkpoint.source.path)
    return False if keeps else None


def _is_whole(src: str | os.PathLike[str], kind: str) -> bool:
    """Whether a source has whole parameters, so that a spec is for the target."""
    reader = find_reader(local_path(src)) if kind == "auto" else reader_of(kind)
    return reader is None or reader.parameters is None


def _carried(checkpoint: Checkpoint, copy_from: str | os.PathLike[str] | None) -> tuple[str, ...]:
    """The files to carry along, by name: those that the user named come before those of the source."""
    given = checkpoint.source.carried if isinstance(checkpoint, ForeignCheckpoint) else ()
    found = {os.path.basename(path): path for path in given}
    if copy_from is not None:
        where = local_path(copy_from)
        if not os.path.exists(where):
            raise ValueError(f"copy_from: there is no {where}")
        found.update({os.path.basename(path): path for path in carried_files(where)})
    return tuple(found.values())


def _refuse_opaque(checkpoint: Checkpoint, items: Iterable[Item], writer: SystemWriter) -> None:
    found = [(item.name, named[0]) for item in items if (named := opaque(item.dtype)) is not None]
    if found and not writer.keeps_opaque:
        name, dtype = found[0]
        raise UnsupportedSource(
            f"{checkpoint.path}: {name!r} has the element type {dtype!r}, of which there are no arrays, and "
            f"{writer.kind!r} cannot keep it. Convert to safetensors or hf, or select other leaves"
        )


def _refuse_arranged_lightning(source: str, tree: Node) -> None:
    """Lightning could not load such a ``.ckpt``, and the user would find out too late."""
    keys = {key for key, _ in pairs_of(tree) or ()}
    if "pytorch-lightning_version" in keys and "state_dict" not in keys:
        raise UnsupportedSource(
            f"{source}: a training of Lightning that is arranged into model and optimizer, and Lightning "
            "loads no .ckpt of that form. Convert Lightning's own file as it was saved (as_training=False, "
            "--as-saved), or name the target .pt"
        )


def _refuse_source(checkpoint: Checkpoint, target: str) -> None:
    """The target must not be a part of the source, nor hold it."""
    source, wanted = os.path.realpath(checkpoint.path), os.path.realpath(target)
    if wanted == source or wanted.startswith(source + os.sep) or source.startswith(wanted + os.sep):
        raise CheckpointExists(
            f"{target} and the source {checkpoint.path} contain each other: choose another path"
        )
