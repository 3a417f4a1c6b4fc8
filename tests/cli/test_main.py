"""The command itself: help, version, exit codes, errors, interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everystep import __version__
from everystep.cli.examples import EXAMPLES
from support.processes.command import SHARD, command, damage_manifest, make_run, step_path

COMMANDS = ("ls", "show", "verify", "diff", "stats", "export", "prune", "spec", "drill", "doctor")


def python(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("diff", "--help")], ids=" ".join)
def test_help_and_version_need_neither_numpy_nor_torch(arguments: tuple[str, ...]) -> None:
    code = """
import atexit, sys
atexit.register(lambda: print("heavy:", [name for name in ("numpy", "torch") if name in sys.modules]))
from everystep.cli import main
main()
"""
    result = python(code, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("heavy: []")


def test_version() -> None:
    assert command("--version").out == f"everystep {__version__}\n"


@pytest.mark.parametrize("module", ["everystep", "everystep.cli"])
def test_runs_as_a_module(module: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    assert run("--version") == (0, f"everystep {__version__}\n", "")
    missing = str(tmp_path / "missing")
    expected = command("ls", missing)
    assert run("ls", missing) == (expected.code, expected.out, expected.err)
    assert run("ls", "--none")[2].startswith("Usage: everystep ls ")


def test_without_a_command_it_shows_help_and_counts_as_wrong_usage() -> None:
    outcome = command()
    assert outcome.code == 2
    for name in COMMANDS:
        assert name in outcome.out + outcome.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name: str) -> None:
    outcome = command(name, "--help")
    assert outcome.code == 0
    assert "--json" in outcome.out


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("show",), ("ls", "a", "b"), ("show", "x", "--nonsense"), ("diff", "a"), ("export", "a")],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_says_why(arguments: tuple[str, ...]) -> None:
    outcome = command(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Usage" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "{missing}"),
        ("show", "{missing}"),
        ("stats", "{missing}"),
        ("verify", "{missing}"),
        ("diff", "{missing}", "{missing}"),
        ("export", "{missing}", "{missing}.safetensors"),
        ("prune", "{missing}"),
        ("doctor", "{missing}"),
        ("bench", "{missing}"),
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("kind", ["nothing", "file"])
def test_a_path_with_nothing_or_a_file_at_it_is_one_clear_line(
    arguments: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    missing = tmp_path / "elsewhere"
    if kind == "file":
        missing.write_text("not a directory")
    filled = [argument.format(missing=missing) for argument in arguments]
    outcome = command(*filled)
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.startswith("everystep: ")
    assert outcome.err.count("\n") == 1
    assert str(missing) in outcome.err

    as_json = command(*filled, "--json")
    assert as_json.code == 1
    assert as_json.err == ""
    error = as_json.document["error"]
    assert str(missing) in error["message"]
    assert error["type"] in ("CheckpointNotFound", "FileNotFoundError", "NotADirectoryError")
    assert [path.name for path in tmp_path.iterdir()] == (["elsewhere"] if kind == "file" else [])


def test_a_corrupt_checkpoint_is_one_line_and_in_json_names_its_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    damage_manifest(step_path(run, 1))
    outcome = command("show", run)
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert outcome.err.count("\n") == 1
    error = command("show", run, "--json").document["error"]
    assert error["type"] == "CorruptCheckpoint"
    assert error["path"] == str(step_path(run, 1) / SHARD)


def test_a_directory_that_is_neither_run_nor_checkpoint_says_so(tmp_path: Path) -> None:
    outcome = command("show", tmp_path)
    assert outcome.code == 1
    assert "not a checkpoint" in outcome.err


BLOCKED = """
import sys, time
import everystep.store
def block(*args, **kwargs):
    print("ready", flush=True)
    while True:
        time.sleep(0.05)  # not one long wait: a signal right before it would be heard at its end only
everystep.store.verify = block
from everystep.cli import main
sys.argv = ["everystep", "verify", *sys.argv[1:]]
main()
"""


def test_ctrl_c_exits_with_130_and_says_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=240)
    assert (child.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize("extra", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_goes_away_is_no_error_to_complain_about(
    extra: tuple[str, ...], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", range(1, 4))
    code = """
import os, sys
read, write = os.pipe()
os.close(read)
os.dup2(write, 1)
from everystep.cli import main
sys.argv = ["everystep", "ls", *sys.argv[1:]]
main()
"""
    result = python(code, str(run), *extra)
    assert result.returncode == 141
    assert result.stderr == ""


WAYS = {
    "show": ("show", "{run}"),
    "ls json": ("ls", "{run}", "--json"),
    "error json": ("ls", "{run}/nothing", "--json"),
    "version": ("--version",),
    "help": ("ls", "--help"),
}


def shell(redirection: str, *arguments: str, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    """The command with its output redirected as a shell does it."""
    line = [sys.executable, *(["-u"] if unbuffered else []), "-m", "everystep.cli", *arguments]
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *line],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("unbuffered", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
def test_a_full_device_for_the_output_is_one_line(
    arguments: tuple[str, ...], unbuffered: bool, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", [1])
    filled = [argument.format(run=run) for argument in arguments]
    result = shell(">/dev/full", *filled, unbuffered=unbuffered)
    assert result.returncode == 1
    assert result.stderr.startswith("everystep: ")
    assert result.stderr.endswith("No space left on device\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
def test_a_closed_output_is_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    result = shell(">&-", *(argument.format(run=run) for argument in arguments))
    assert (result.returncode, result.stderr) == (1, "everystep: standard output is closed\n")


def test_a_closed_stderr_does_not_matter(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    assert shell("2>&-", "ls", str(run)).returncode == 0
    result = shell("2>&-", "ls", str(run / "nothing"))
    assert (result.returncode, result.stdout) == (1, "")


def test_progress_bars_keep_off_what_is_no_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    result = subprocess.run(
        [sys.executable, "-m", "everystep.cli", "verify", str(run), "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0
    assert result.stderr == ""
    assert json.loads(result.stdout)["intact"] is True


def test_help_and_version_as_others_spell_them() -> None:
    assert command("help", "diff").out == command("diff", "--help").out
    assert command("help").out == command("--help").out
    assert command("help", "shelf", "ls").out == command("shelf", "ls", "--help").out
    assert command("-V").out == command("--version").out


ALL_COMMANDS = (*COMMANDS, "view", "completion", "shelf", "shelf export", "bench", "study run", "convert")


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_help_names_no_value_for_a_flag_and_no_braces(name: str) -> None:
    outcome = command(*name.split(), "--help")
    assert outcome.code == 0
    assert "<bool>" not in outcome.out
    assert "{" not in outcome.out.split("Options")[0]
    assert not [line for line in outcome.out.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_ends_with_the_examples_of_its_command(name: str) -> None:
    ending = command(*name.split(), "--help").out.rpartition(" Examples\n")[2]
    for line, what in EXAMPLES[name]:
        assert line in ending
        assert what in ending


def test_a_command_of_a_group_has_no_examples_of_its_namesake() -> None:
    assert "Examples" not in command("shelf", "ls", "--help").out
