"""``everystep convert SRC DST``: a checkpoint of one system as one of another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, MaxInflation, Session, session

if TYPE_CHECKING:
    from everystep.universal import Converted

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def convert(
    src: Annotated[
        Path,
        typer.Argument(readable=False, metavar="SRC", help="A checkpoint of any known system, or a run."),
    ],
    dst: Annotated[
        Path, typer.Argument(readable=False, metavar="DST", help="The file or directory to write.")
    ],
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="The system that wrote SRC; auto: by its files.")
    ] = "auto",
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="KIND",
            help="everystep, safetensors, hf, torch, dcp, ds-universal, megatron; default: as DST ends.",
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option("--spec", readable=False, metavar="FILE", help="Layout rules for SRC; see spec check."),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="GLOB",
            help="Only leaves that match or are in this subtree; may be given again.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="TYPE", help="Cast floating-point leaves, such as to bf16."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Read both sides again and compare them, before DST appears."
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; show what would be written.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an Everystep checkpoint or a file.")
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of a Hugging Face target, such as 5GB.")
    ] = "5GB",
    copy_from: Annotated[
        Path | None,
        typer.Option(
            "--copy-from",
            readable=False,
            metavar="PATH",
            help="config.json, or a directory with it and a tokenizer, for a Hugging Face target.",
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", help="Cut the parameters over N tensor-parallel ranks.")
    ] = 1,
    pp: Annotated[int, typer.Option("--pp", metavar="N", help="Cut the layers over N pipeline stages.")] = 1,
    zero_stage: Annotated[
        int | None,
        typer.Option(
            "--zero-stage", metavar="1|2|3", help="The ZeRO stage that DeepSpeed is to load it with."
        ),
    ] = None,
    as_training: Annotated[
        bool | None,
        typer.Option(
            "--as-training/--as-saved",
            help="Arrange SRC into model and optimizer, or keep what its own library loads.",
        ),
    ] = None,
    max_inflation: MaxInflation = 100,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of one system as one of another.

    DST appears whole or not at all, and every leaf passes through bounded memory. Names of a model lose their
    prefix model. where other tools expect them without it.
    """
    nbytes = _parse_size(max_shard_size)
    with session(as_json) as out:
        import time

        from everystep import Options, universal

        began = time.perf_counter()
        try:
            with out.progress("converting") as progress:
                done = universal.convert(
                    src,
                    dst,
                    kind=kind,
                    spec=spec,
                    to=to,
                    select=select,
                    dtype=dtype,
                    verify=verify,
                    dry_run=dry_run,
                    overwrite=force,
                    max_shard_nbytes=nbytes,
                    copy_from=copy_from,
                    tp=tp,
                    pp=pp,
                    zero_stage=zero_stage,
                    as_training=as_training,
                    options=Options(max_inflation=max_inflation),
                    progress=progress,
                )
        except ValueError as error:
            from everystep.errors import EverystepError

            if isinstance(error, EverystepError):
                raise
            raise typer.BadParameter(str(error)) from None
        if as_json:
            out.emit(done)
        else:
            _print(out, done, time.perf_counter() - began)
        out.finish(problem=False)


def _parse_size(text: str) -> int:
    digits = text.strip().upper().removesuffix("B")
    unit = digits.lstrip("0123456789.")
    try:
        nbytes = int(float(digits[: len(digits) - len(unit)]) * _UNITS[unit.strip()])
    except (KeyError, ValueError, OverflowError):
        nbytes = 0
    if nbytes <= 0:
        raise typer.BadParameter(
            f"{text!r} is not a size such as 5GB or 500MiB", param_hint="--max-shard-size"
        )
    return nbytes


def _print(out: Session, done: Converted, seconds: float) -> None:
    from everystep.cli import words

    amount = f"{words.count(done.leaves, 'leaf', 'leaves')}, {words.size(done.nbytes)}"
    speed = f", {words.speed(done.nbytes, seconds)}" if done.nbytes > 100_000_000 and not done.dry_run else ""
    verified = ", verified" if done.verified else ""
    would = "would be " if done.dry_run else ""
    out.say(f"{words.plain(done.path)}: {would}{done.to}, {amount} from {done.kind}{speed}{verified}")
    if done.dry_run:
        for file in done.files:
            if file.name:  # otherwise it is DST itself, and the line above is enough
                out.say(f"  {words.plain(file.name)}: {words.size(file.nbytes)}")
    for count, what in (
        (done.casts, "cast to another type"),
        (done.tied, "tied to others and written once"),
        (done.left_out, "left out"),
    ):
        if count:
            out.say(f"{words.count(count, 'leaf', 'leaves')} {what}", style="dim")
    for note in done.notes:
        out.say(f"note: {words.plain(note)}")
