"""``everystep completion``, and the examples of ``--help``."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from everystep.cli.app import app
from everystep.cli.completion import proposals
from everystep.cli.examples import EXAMPLES
from support.processes.command import command, step_path

ROOT = typer.main.get_command(app)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for step in (5, 10, 20):
        step_path(tmp_path / "runs/a", step).mkdir(parents=True)
    return tmp_path / "runs/a"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("everystep sh", ["show", "shelf"]),
        ("everystep shelf ", ["ls", "show", "verify", "export"]),
        ("everystep diff --s", ["--summary"]),
        (
            "everystep diff a b --",
            ["--leaves", "--ignore", "--summary", "--all", "--max-inflation", "--json", "--help"],
        ),
        ("everystep bench --shape ", ["gpt2", "few-large", "many-small"]),
        ("everystep bench --quick f", []),
        ("everystep completion ", ["bash", "zsh", "fish"]),
        ("everystep help sh", ["show", "shelf"]),
        ("everystep help shelf v", ["verify"]),
        ("everystep convert a b --to d", ["ds-universal", "dcp"]),
        ("everystep convert --kind ev", ["everystep"]),
        ("everystep show runs/a@", ["runs/a@latest", "runs/a@20", "runs/a@10", "runs/a@5"]),
        ("everystep diff runs/a@5 runs/a@1", ["runs/a@10"]),
        ("everystep show runs/", []),
        ("everystep show nowhere@", []),
        ("everystep drill -- python @", []),
    ],
)
def test_proposals(line: str, expected: list[str], run: Path) -> None:
    assert proposals(ROOT, line) == expected


def test_inside_of_a_run_steps_are_proposed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert proposals(ROOT, "everystep show @2") == ["@20"]


def test_a_shell_must_be_named() -> None:
    outcome = command("completion")
    assert outcome.code == 2
    assert "bash, zsh or fish" in " ".join(outcome.err.replace("│", " ").split())


def test_bash_completes_behind_the_at_sign(run: Path) -> None:
    """In bash a word ends at an @, so a proposal must not repeat what stands before it."""
    line = "everystep show runs/a@"
    proposed = " ".join(proposals(ROOT, line))
    script = f"""
everystep() {{ test "$3" = {shlex.quote(line)} && printf '%s\\n' {proposed}; }}
{command("completion", "bash").out}
COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}; _everystep
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["latest", "20", "10", "5"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_is_accepted_by_its_shell(shell: str) -> None:
    script = command("completion", shell).out
    assert "everystep completion --words" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, timeout=60, check=True)


def test_help_ends_with_examples_that_name_real_commands_and_options() -> None:
    assert "everystep ls runs/gpt" in command("--help").out
    assert "--best loss:min:3" in command("prune", "--help").out
    for name, examples in EXAMPLES.items():
        for line, what in examples:
            words = shlex.split(line.partition("|")[0])
            assert what
            named = None if words[0] == "eval" else ROOT.get_command(None, words[1])
            if named is None or hasattr(named, "commands"):
                continue
            known = {option for found in named.params for option in found.opts}
            own = words[: words.index("--")] if "--" in words else words
            assert {word for word in own if word.startswith("--")} <= known, line
            assert name in ("", words[1])
