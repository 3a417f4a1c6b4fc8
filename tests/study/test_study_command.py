"""``everystep study run|report|setup``. What is measured is tested in tests/study/test_study.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystep_study import environments, frameworks
from support.processes.command import command

GONE = {"gone": frameworks.FrameworkEntry("Gone", "no_such_worker", "never-built")}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--suite", "speed"), "no suite speed"),
        (("--frameworks", "torch,caffe"), "no framework caffe"),
        (("--models", "lenet"), "no model lenet"),
    ],
)
def test_a_wrong_name_is_wrong_usage_and_says_what_there_is(
    option: tuple[str, str], message: str, tmp_path: Path
) -> None:
    outcome = command("study", "run", *option, "--out", tmp_path / "out")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_run_and_report_of_a_framework_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "FRAMEWORKS", GONE)
    out = tmp_path / "out"
    outcome = command("study", "run", "--quick", "--suite", "cost", "--models", "mlp", "--out", out)
    assert outcome.code == 0, outcome.err
    assert "everystep study setup never-built" in outcome.err
    found = command("study", "report", out, "--json").document
    assert "Not installed, so not measured: Gone, MLP" in Path(found["markdown"]).read_text()
    assert Path(found["html"]).read_text().startswith("<!DOCTYPE html>")


def test_report_of_nothing_is_one_clear_line(tmp_path: Path) -> None:
    outcome = command("study", "report", tmp_path)
    assert outcome.code == 1
    assert "has no results.jsonl" in outcome.err


def test_setup_builds_the_environment_of_a_framework_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[str, Path]] = []

    def build(name: str, folder: Path, say: object) -> Path:
        built.append((name, folder))
        return folder / name / "bin" / "python"

    monkeypatch.setattr(environments, "build", build)
    monkeypatch.setenv("EVERYSTEP_PEERS", str(tmp_path))
    assert command("study", "setup", "lightning").code == 0
    assert built == [("transformers", tmp_path)]
    assert "this environment" in command("study", "setup", "torch").out
    unknown = command("study", "setup", "caffe")
    assert unknown.code == 2
    assert "chainer" in unknown.err
