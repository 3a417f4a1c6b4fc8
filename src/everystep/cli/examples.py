"""Examples that ``--help`` shows, by command; and the classes by which typer runs commands and shows help."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from everystep.errors import UnsupportedURL
from everystep.paths import local_path

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("everystep ls runs", "the runs below a directory"),
        ("everystep ls runs/gpt", "the checkpoints of a run"),
        ("everystep show runs/gpt@30", "what step 30 holds"),
        ("everystep diff runs/gpt@-2 runs/gpt@-1", "what the last step changed"),
        ("everystep verify runs/gpt", "read and check every byte"),
        ("everystep export runs/gpt w.safetensors", "one file for other tools"),
        ('eval "$(everystep completion bash)"', "complete with Tab; also zsh, fish"),
    ),
    "ls": (
        ("everystep ls runs/gpt", "step, time, size and metrics of each checkpoint"),
        ("everystep ls runs", "the runs below, each with its newest checkpoint"),
        ("everystep ls runs/gpt --json | jq '.checkpoints[-1].metrics'", "for scripts"),
    ),
    "show": (
        ("everystep show runs/gpt", "the newest checkpoint"),
        ("everystep show runs/gpt@30 --depth 2", "totals by two parts of the names"),
        ("everystep show runs/gpt --leaves model.h.0", "the leaves of one subtree"),
        ("everystep show runs/gpt --leaves '*.bias'", "the leaves that match"),
    ),
    "stats": (
        ("everystep stats runs/gpt", "what saves cost, and how metrics went"),
        ("everystep stats runs/gpt --metrics", "the metrics of every step, pruned ones too"),
        ("everystep stats runs/gpt --plot stats.svg", "a picture"),
    ),
    "verify": (
        ("everystep verify runs/gpt@latest", "one checkpoint"),
        ("everystep verify runs/gpt", "all checkpoints of a run"),
        ("everystep verify runs", "all runs below"),
    ),
    "diff": (
        ("everystep diff runs/gpt@20 runs/gpt@30", "leaf by leaf"),
        ("everystep diff runs/gpt@20 runs/gpt@30 --summary", "subtree by subtree"),
        ("everystep diff runs/a runs/b --leaves model --ignore '*.bias'", "some leaves only"),
    ),
    "export": (
        ("everystep export runs/gpt model.safetensors --select model --strip model.", "only the model"),
        ("everystep export runs/gpt@30 all.safetensors", "all leaves of step 30"),
    ),
    "convert": (
        ("everystep convert ds-run/global_step100 runs/start", "DeepSpeed to Everystep"),
        ("everystep convert runs/gpt@30 hf-model --to hf --copy-from gpt2/config.json", "to Hugging Face"),
        ("everystep convert runs/gpt model.pt", "to a file of torch.save, and compare"),
        ("everystep convert model.bin out --dry-run", "only say what would be written"),
    ),
    "prune": (
        ("everystep prune runs/gpt --dry-run", "what would go by the rules of its training"),
        ("everystep prune runs/gpt --last 2 --every 1000", "keep the last 2, and every 1000 steps"),
        ("everystep prune runs/gpt --best loss:min:3", "keep the best 3, too"),
    ),
    "doctor": (("everystep doctor /scratch", "is this a good place for checkpoints?"),),
    "drill": (("everystep drill -- python train.py --steps 200", "kill it ten times, resume, compare"),),
    "view": (
        ("everystep view runs/gpt", "a page on this machine, live"),
        ("everystep view runs/a runs/b --out page.html", "one file that loads nothing"),
    ),
    "shelf": (
        ("everystep shelf ls state.shelf", "what a shelf holds"),
        ("everystep shelf export state.shelf out.npz", "its arrays for other tools"),
    ),
    "completion": (
        ('eval "$(everystep completion bash)"', "in ~/.bashrc"),
        ('eval "$(everystep completion zsh)"', "in ~/.zshrc, after compinit"),
        ("everystep completion fish | source", "in ~/.config/fish/config.fish"),
    ),
}


class ExampleCommand(TyperCommand):
    """A command whose help ends with examples. It refuses URLs where it takes paths."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [part for word in args for part in (word, word.partition("=")[2])]
        empty = any(not word or (word.startswith("--") and word.endswith("=")) for word in args)
        rest = super().parse_args(ctx, args)
        for value in ctx.params.values():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path):
                    if empty and path == Path():
                        raise typer.BadParameter(
                            "a path is empty: perhaps a variable of the shell is not set. Nothing was read "
                            "or written. Give . for the current directory"
                        )
                    _refuse_url(path, given)
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return _without_braces(super().collect_usage_pieces(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _plain_help(self, ctx):
            super().format_help(ctx, formatter)


class ExampleGroup(TyperGroup):
    """A group of commands, such as ``everystep`` itself. Its help ends with examples, too."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return _without_braces(super().collect_usage_pieces(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _plain_help(self, ctx):
            super().format_help(ctx, formatter)


def _refuse_url(path: Path, given: list[str]) -> None:
    """Reports wrong usage if `path` is a URL. `given` still has both slashes; a `Path` loses one."""
    try:
        local_path(next((word for word in given if "://" in word and Path(word) == path), path))
    except UnsupportedURL as error:
        raise typer.BadParameter(str(error)) from None


def _without_braces(pieces: list[str]) -> list[str]:
    """``PATH`` for what typer shows as ``{PATH}``: braces mean a choice in other manuals."""
    return [re.sub(r"^\{(.*)\}(\.\.\.)?$", r"\1\2", piece) for piece in pieces]


@contextmanager
def _plain_help(command: TyperCommand | TyperGroup, ctx: Any) -> Iterator[None]:
    """Prints what typer prints inside this context, and then the examples.

    A flag is shown without ``<bool>``, as it takes no value. Piped help has no spaces at the ends of lines.
    """
    for option in command.get_params(ctx):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    if sys.stdout.isatty():
        yield
    else:
        # The same encoding: the frames of the help depend on it.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        captured = TextIOWrapper(BytesIO(), encoding=encoding, errors="backslashreplace")
        with redirect_stdout(captured):
            yield
        captured.seek(0)
        print("\n".join(line.rstrip() for line in captured.read().splitlines()))
    _print(ctx.command_path.partition(" ")[2])


def _print(name: str) -> None:
    """Each example with what it does: after it or, if that is too far to the right, above it."""
    import shutil

    examples = EXAMPLES.get(name, ())
    if not examples:
        return
    widest = max(len(line) for line, _ in examples)
    fits = widest + 5 + max(len(what) for _, what in examples) <= shutil.get_terminal_size().columns
    print(" Examples")
    for line, what in examples:
        print(f"   {line:{widest}}  {what}" if fits else f"   # {what}\n   {line}")
