"""``everystep doctor [DIR]``: what this machine and a directory's filesystem can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, Session, session

if TYPE_CHECKING:
    from everystep.inspect import Diagnosis


def doctor(
    directory: Annotated[
        Path,
        typer.Argument(
            readable=False,
            metavar="DIR",
            show_default=False,
            help="Where checkpoints will go; default: here.",
        ),
    ] = Path("."),
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Measure it: writes 256 MiB, three times.")
    ] = True,
    torch: Annotated[bool, typer.Option("--torch", help="Import torch to ask it for GPUs.")] = False,
    as_json: Json = False,
) -> None:
    """Show what this machine and filesystem can do: which backend is used and why, and how fast it is.

    Exit code 1 if checkpoints cannot be saved there.
    """
    with session(as_json) as out:
        from everystep import inspect
        from everystep.inspect.machine import SPEED_NBYTES

        nbytes = SPEED_NBYTES if speed else 0
        with out.progress("measuring") as progress:
            found = inspect.diagnose(directory, speed_nbytes=nbytes, import_torch=torch, progress=progress)
        if as_json:
            out.emit(found)
        else:
            _print(out, found)
        out.finish(problem=bool(found.problems))


def _print(out: Session, found: Diagnosis) -> None:
    from everystep.cli import words
    from everystep.cli.session import facts

    mount, free = found.mount, words.size(found.free_nbytes)
    rows = [
        ("everystep", f"{found.everystep}, Python {found.python}{_torch(found)}"),
        (
            "machine",
            f"{found.kernel}, {words.count(found.cpus, 'CPU')}, {words.size(found.memory_nbytes)} memory",
        ),
        ("directory", words.plain(found.directory)),
        ("filesystem", f"{mount.kind} at {words.plain(mount.point)}{_device(found)}, {free} free"),
        *_abilities(found),
        ("backend", f"{found.choice.backend or 'none'}: {found.choice.why}"),
        *([] if found.shelf_medium is None else [("shelves", found.shelf_medium)]),
        ("checksums", f"{found.hash_nbytes_per_second / 1e9:.1f} GB/s on one core"),
        *_speeds(found),
    ]
    out.show(facts(rows))
    for problem in found.problems:
        out.say(f"problem: {problem}", style="bold red")
    for advice in found.advice:
        out.say(f"advice: {advice}", style="yellow")
    if not found.problems and not found.advice:
        out.say("all is well", style="green")


def _torch(found: Diagnosis) -> str:
    if found.torch is None:
        return ", no torch"
    said = f", torch {found.torch.version}"
    if found.torch.cuda is not None:
        return said + (f" with {', '.join(found.torch.devices)}" if found.torch.devices else " without GPUs")
    return said + (", NVIDIA driver loaded" if found.nvidia else "")


def _device(found: Diagnosis) -> str:
    if found.device is None:
        return ""
    return f" on {found.device.name}"


def _abilities(found: Diagnosis) -> list[tuple[str, str]]:
    from everystep.cli import words

    able = found.capabilities
    if able is None:
        return []
    memory, offsets = words.size(able.memory_alignment), words.size(able.offset_alignment)
    aligned = f"yes, memory aligned to {memory}, offsets to {offsets}" if able.offset_alignment else "yes"
    return [
        ("direct I/O", aligned if able.direct else f"no: {able.direct_reason}"),
        ("io_uring", "yes" if able.uring else f"no: {able.uring_reason}"),
        ("huge pages", "yes" if found.huge_pages else "no"),
    ]


def _speeds(found: Diagnosis) -> list[tuple[str, str]]:
    from everystep.cli import words

    speed = found.speed
    if speed is None:
        return []
    note = " (through the page cache)" if speed.cached else ""
    return [
        ("durable write", f"{words.speed(speed.nbytes, speed.write_seconds)}{note}"),
        ("read", f"{words.speed(speed.nbytes, speed.read_seconds)}{note}"),
        ("sync of 4 KiB", words.duration(speed.sync_seconds)),
    ]
