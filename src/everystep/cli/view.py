"""``everystep view RUN``: a web page that shows runs, as one file or live on this machine."""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from everystep.cli.session import Json, Progress, Session, session

_SUFFIXES = (".html", ".htm")


def view(
    runs: Annotated[
        list[Path],
        typer.Argument(readable=False, metavar="RUN", help="Runs, directories above runs, or checkpoints."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", readable=False, metavar="PAGE.html", help="Write one file.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine, live; the default without --out.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port to serve on; 0: any that is free.")
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=0, help="With --out: how long arrays may be read for histograms."),
    ] = 10.0,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every byte of every checkpoint first, and show what is damaged."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show runs in a web page: saves, durability, metrics, leaves, changes, disks.

    The file of --out is complete and loads nothing. A page that is served is live while a training goes on;
    only this machine can open it, and only with the address that is printed. Nothing in the run changes.
    """
    if out is not None and serve:
        raise typer.BadParameter("--out writes a file, --serve serves a page: choose one")
    if out is not None and out.suffix.lower() not in _SUFFIXES:
        raise typer.BadParameter(f"a page is written as .html, not as {out.name!r}")
    with session(as_json) as out_session:
        try:
            if out is not None:
                _write(out_session, runs, out, seconds, verify)
            else:
                _serve(out_session, runs, port, verify)
        except ValueError as error:  # too many runs for a page
            raise typer.BadParameter(str(error)) from None


def _write(out: Session, runs: list[Path], path: Path, seconds: float, verify: bool) -> None:
    from everystep.cli import words
    from everystep.view import write_page

    with _progress(out, verify) as progress:
        done = write_page(runs, path, seconds=seconds, verify=verify, progress=progress)
    if out.as_json:
        out.emit(done)
    else:
        out.say(f"{words.plain(done.path)}, {words.size(done.nbytes)}: open it in a browser")
    out.finish(problem=False)


def _serve(out: Session, runs: list[Path], port: int, verify: bool) -> None:
    import sys

    from everystep.view import serve_page

    try:
        with _progress(out, verify) as progress:
            server = serve_page(runs, port=port, verify=verify, progress=progress)
    except OSError as error:
        # Errors of files name their file. The error of a port names nothing.
        if error.filename is not None or error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "is not allowed to this user"
        out.fail(type(error).__name__, f"port {port} {why}: choose another with --port, or 0 for any")
    with server:
        if out.as_json:
            out.emit({"url": server.url, "port": server.port})
        else:
            out.say(server.url)
            out.say("only this machine can open it; Ctrl-C ends it", style="dim")
        sys.stdout.flush()
        server.wait()


def _progress(out: Session, verify: bool) -> AbstractContextManager[Progress]:
    """A bar for bytes that are verified. Everything else is quick."""
    return out.progress("verifying") if verify else nullcontext(lambda done, total: None)
