"""The environments of other systems: what is in them, and what happens without them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from everystep_study.environments import ENVIRONMENTS
from support.processes import peers

VERSIONS = """
import json, sys
from importlib.metadata import version
print("\\n" + json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def pins(name: str) -> dict[str, str]:
    words = " ".join(ENVIRONMENTS[name]).split()
    return dict(word.split("==") for word in words if "==" in word)


@pytest.mark.peers
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_has_the_versions_of_the_table(name: str) -> None:
    wanted = pins(name)
    found = json.loads(peers.run(name, "-c", VERSIONS, *wanted).splitlines()[-1])
    assert {package: version.partition("+")[0] for package, version in found.items()} == wanted


def test_torch_is_the_one_that_we_develop_with() -> None:
    ours = (peers.PROJECT / "requirements-dev.txt").read_text().split()
    assert all(pins(name).get("torch") in (None, "2.13.0") for name in ENVIRONMENTS)
    assert "torch==2.13.0" in ours


def test_a_missing_environment_fails_with_the_command_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    with pytest.raises(pytest.fail.Exception, match=r"run `make peers` or `python tools/peers.py deepspeed`"):
        peers.run("deepspeed", "-c", "")


def test_a_script_that_hangs_or_fails_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake" / "bin").mkdir(parents=True)
    (tmp_path / "fake" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    assert "hello" in peers.run("fake", "-c", "print('hello')")
    with pytest.raises(pytest.fail.Exception, match="ended with 3:\nbye"):
        peers.run("fake", "-c", "print('bye'); raise SystemExit(3)")
    with pytest.raises(pytest.fail.Exception, match="took more than"):
        peers.run("fake", "-c", "import time; time.sleep(60)", timeout=0.5)


def test_a_killed_build_leaves_no_lock_and_that_of_others_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake" / "bin").mkdir(parents=True)
    (tmp_path / "fake" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    other = tmp_path / "fake" / "torch-extensions" / "other" / "lock"
    other.parent.mkdir(parents=True)
    other.touch()
    os.utime(other, (1, 1))
    mine = tmp_path / "fake" / "torch-extensions" / "mine" / "lock"
    build = (
        f"import pathlib, time; p = pathlib.Path({str(mine)!r}); p.parent.mkdir(); p.touch(); time.sleep(60)"
    )
    with pytest.raises(pytest.fail.Exception, match="took more than"):
        peers.run("fake", "-c", build, timeout=3)
    assert mine.parent.exists()
    assert not mine.exists()
    assert other.exists()
