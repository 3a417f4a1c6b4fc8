"""What cannot be read, or is not what its name says: a problem with exit code 1, that hides nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import everystep
from support.processes.command import SHARD, TWO_FILES, Outcome, command, make_run, make_state, step_path

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@contextmanager
def nobody() -> Iterator[None]:
    """A user who owns nothing. The real user too: `access` asks for that one."""
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


def as_nobody(*arguments: str | Path) -> Outcome:
    command(*arguments)  # imports what it needs: maybe only root can
    with nobody():
        return command(*arguments)


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o744], ids=["closed", "names only"])
@pytest.mark.parametrize("name", ["ls", "show", "verify", "diff", "export", "stats", "prune"])
def test_a_directory_that_may_not_be_read_is_an_error_and_not_wrong_usage(
    name: str, mode: int, place: Path
) -> None:
    run = make_run(place / "run", [1])
    run.chmod(mode)
    more = {"diff": [run], "export": [place / "out.safetensors"]}.get(name, [])
    outcome = as_nobody(name, run, *more, "--json")
    assert outcome.code == 1
    said = str(outcome.document)
    assert str(run) in said
    assert "Permission denied" in said
    as_text = as_nobody(name, run, *more)
    assert as_text.code == 1
    assert "Usage" not in as_text.err


@needs_root
@pytest.mark.parametrize("name", ["ls", "show", "verify"])
def test_a_checkpoint_of_which_only_names_may_be_read_is_not_taken_for_an_empty_run(
    name: str, place: Path
) -> None:
    everystep.save(place / "one", make_state())
    (place / "one").chmod(0o744)
    outcome = as_nobody(name, place / "one", "--json")
    assert outcome.code == 1
    assert outcome.document["error"]["type"] == "ReadDenied"


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o744], ids=["closed", "names only"])
def test_opening_what_may_not_be_read_is_a_typed_error(mode: int, place: Path) -> None:
    everystep.save(place / "one", make_state())
    everystep.load(place / "one")
    (place / "one").chmod(mode)
    with nobody():
        for use in (everystep.open, everystep.load, everystep.verify):
            with pytest.raises(everystep.errors.ReadDenied, match="Permission denied") as caught:
                use(place / "one")
            assert isinstance(caught.value, PermissionError)
            assert f"make it readable for user {NOBODY}" in str(caught.value)
            assert caught.value.filename == str(place / "one")


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o744], ids=["closed", "names only"])
def test_one_unreadable_step_does_not_hide_the_others(mode: int, place: Path) -> None:
    run = make_run(place / "run", [1, 2, 3])
    step_path(run, 2).chmod(mode)
    listed = as_nobody("ls", run, "--json")
    assert listed.code == 1
    damages = [entry["damage"] for entry in listed.document["checkpoints"]]
    assert damages[0] is damages[2] is None
    assert "Permission denied" in damages[1]
    assert listed.document["damaged"] == [str(step_path(run, 2))]

    verified = as_nobody("verify", run, "--json")
    assert verified.code == 1
    assert [item["intact"] for item in verified.document["checkpoints"]] == [True, False, True]
    assert "Permission denied" in verified.document["checkpoints"][1]["problems"][0]["reason"]


@pytest.mark.parametrize("kind", ["a file", "a link to itself", "a link to nothing", "a fifo"])
def test_one_strange_step_does_not_hide_the_others(kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 3])
    strange = step_path(run, 2)
    if kind == "a file":
        strange.write_text("not a checkpoint")
    elif kind == "a fifo":
        os.mkfifo(strange)
    else:
        strange.symlink_to(strange if kind == "a link to itself" else run / "nothing")
    listed = command("ls", run, "--json")
    assert listed.code == 1
    assert [entry["damage"] is None for entry in listed.document["checkpoints"]] == [True, False, True]
    assert "damaged: step 2" in command("ls", run).out
    verified = command("verify", run, "--json")
    assert verified.code == 1
    assert [item["intact"] for item in verified.document["checkpoints"]] == [True, False, True]
    assert verified.document["checkpoints"][1]["problems"][0]["file"] == str(strange)


@needs_root
@pytest.mark.parametrize("files", ["one", "two"])
def test_verify_names_the_file_that_may_not_be_read(files: str, place: Path) -> None:
    everystep.save(place / "one", make_state(), options=TWO_FILES if files == "two" else None)
    file = place / "one" / ("manifest.json" if files == "two" else SHARD)
    file.chmod(0o600)
    outcome = as_nobody("verify", place / "one", "--json")
    assert outcome.code == 1
    assert outcome.document["checkpoints"][0]["problems"][0]["file"] == str(file)


@needs_root
def test_an_unreadable_run_beside_others_is_named_and_not_taken_for_verified(place: Path) -> None:
    make_run(place / "runs/open", [1])
    make_run(place / "runs/closed", [1]).chmod(0o700)
    (place / "runs/lost+found").mkdir(mode=0o700)
    listed = as_nobody("ls", place / "runs")
    assert listed.code == 0
    assert "not readable, so not looked into: closed" in listed.lines
    assert "1 run, 1 checkpoint" in listed.out
    assert as_nobody("ls", place / "runs", "--json").document["unreadable"] == [str(place / "runs/closed")]

    verified = as_nobody("verify", place / "runs")
    assert verified.code == 1
    assert "intact open/step-000000000001" in verified.out.replace("   ", " ")
    assert "Permission denied" in verified.out


@needs_root
def test_a_directory_above_an_unreadable_run_is_not_called_empty(place: Path) -> None:
    make_run(place / "runs/closed", [1]).chmod(0o700)
    listed = as_nobody("ls", place / "runs").out
    assert "and no readable runs below it" in listed
    assert "not looked into: closed" in listed
    verified = as_nobody("verify", place / "runs")
    assert verified.code == 1
    assert "Permission denied" in verified.out
