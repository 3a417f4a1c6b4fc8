"""On a narrow terminal nothing is wider than it, and nothing is lost; without UTF-8, all is ASCII."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import everystep
from support.processes.command import command

COMMANDS = (
    "ls .",
    "ls run",
    "show run",
    "show run --depth 2",
    "stats run",
    "stats run --last 100",
    "stats run --metrics",
    "diff run@-2 run",
    "diff run@-2 run --summary",
    "verify run",
    "verify .",
    "doctor . --no-speed",
    "prune run --last 1 --dry-run",
    "shelf ls shelf",
    "show nothing/there/at/all/which/is/a/rather/long/name of nothing",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run and a shelf in the current directory, whose names are short."""
    monkeypatch.chdir(tmp_path)
    state = {"model": {"transformer.h.0.attention.c_attn.weight": np.ones((3, 4)), "b": np.zeros(20)}}
    with everystep.Checkpointer("run", state, mode="sync") as ckpt:
        for step in (1, 20, 123_456):
            state["model"]["b"] += 0.5
            ckpt.save(step, metrics={"loss": 1.25 / step, "accuracy/validation": step / 7, "lr": 3e-4})
    with everystep.Shelf("shelf", size=1 << 20) as shelf:
        shelf["centers"] = np.ones((10, 3))
    return tmp_path


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("line", COMMANDS)
def test_no_line_is_wider_than_the_terminal(
    line: str, columns: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = command(*line.split(" "))
    lines = (outcome.out + outcome.err).splitlines()
    # A word that is longer than a line is not cut where a sentence has it: it may be a path, to be copied.
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []


@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize("line", COMMANDS[1:9])
def test_a_narrow_terminal_shows_every_number(
    line: str, columns: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers(text: str) -> set[str]:
        text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\d+ s ago|(?<=in )[\d.]+|[\d.]+ .B/s", "", text)
        text = re.sub(r"^(id|checkpoint|run|A|B) .*(\n .*)*", "", text, flags=re.MULTILINE)
        return set(re.findall(r"(?<![\w/.-])[\d.,]*\d(?: (?:ms|[KM]?i?B))?(?![\w/-])", text))

    wide = command(*line.split(" "))
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = command(*line.split(" "))
    assert numbers(wide.out) <= numbers(narrow.out)
    assert narrow.code == wide.code


@pytest.mark.parametrize("columns", ["60", "40"])
def test_a_number_and_its_unit_stay_on_one_line(
    columns: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert not re.search(r"^ +(ms|s|[KM]iB|[GM]B/s)\b", command("stats", "run").out, re.MULTILINE)


def _run(program: str, **environment: str) -> bytes:
    left_out = ("PYTHONUTF8", "PYTHONIOENCODING", "LC_ALL", "LANG")
    env = {name: value for name, value in os.environ.items() if name not in left_out} | environment
    return subprocess.run(
        [sys.executable, "-c", program], env=env, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
    ],
    ids=str,
)
def test_without_utf_8_our_own_signs_are_ascii_and_names_escaped(environment: dict[str, str]) -> None:
    said = _run(
        "import sys\n"
        "from everystep.cli import words\n"
        "from everystep.cli.streams import prepare_streams\n"
        "prepare_streams()\n"
        "print(words.duration(5e-5), words.TIMES, words.shortened('abcdef', 4))\n"
        "print('gr\\xf6\\xdfe', '\\u2500\\u2192')",
        **environment,
    )
    assert said.decode("ascii").split() == ["50", "us", "x", "abc...", "gr\\xf6\\xdfe", "-->"]


def test_with_utf_8_they_are_what_they_were() -> None:
    program = (
        "from everystep.cli import words, streams; streams.prepare_streams(); print(words.duration(5e-5))"
    )
    for environment in ({"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONUTF8": "1"}):
        assert _run(program, **environment).decode("utf-8").split() == ["50", "\N{MICRO SIGN}s"]


def test_a_whole_command_in_the_c_locale_is_ascii(here: Path) -> None:
    for arguments in (["stats", "run"], ["show", "run"], ["ls", "--help"]):
        said = _run(
            f"import sys; sys.argv = {['everystep', *arguments]}; from everystep.cli import main; main()",
            LC_ALL="C",
        )
        assert said.decode("ascii").strip()
