"""``holdfast demo``: train, die in the middle of a save, resume. The story is `holdfast.study.demo`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.session import Json, session


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            readable=False,
            help="Keep the runs in this directory; default: a temporary one, removed at the end.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=2, help="Training steps.")] = None,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="The race against torch.save.")] = True,
    as_json: Json = False,
) -> None:
    """Train, get killed in the middle of a save, resume, and prove that nothing shows.

    Takes less than two minutes and needs torch. Exit code 1 unless the two trainings end equal, bit for bit.
    """
    with session(as_json) as out:
        import importlib.util
        from dataclasses import replace

        from rich.console import Console

        from holdfast.study.demo import DemoFailed, DemoOptions, tell

        if importlib.util.find_spec("torch") is None:
            out.fail("TorchMissing", "the demo trains with torch, which is not installed: pip install torch")
        options = DemoOptions(directory=directory)
        if steps is not None:
            options = replace(options, steps=steps, kill_at=max(2, steps * options.kill_at // options.steps))
        if not speed:
            options = replace(options, race_repeats=0)
        try:
            report = tell(options, Console(stderr=as_json))
        except DemoFailed as error:
            out.fail("DemoFailed", str(error))
        if as_json:
            out.emit(report.to_json())
        out.finish(problem=not report.equal)
