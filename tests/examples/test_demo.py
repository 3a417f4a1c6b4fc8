"""The demo proves that a killed training ends as an undisturbed one, and fails if it does not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO), "--repeats", "0", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name.strip('_')}", DEMO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


def test_a_killed_and_resumed_training_equals_an_undisturbed_one(tmp_path: Path) -> None:
    done = run("--dir", tmp_path, "--steps", "6", "--kill-at", "4")
    assert done.returncode == 0, done.stderr
    assert "Last step it reported durable: 3" in done.stdout
    assert "step-000000000004.partial   not a checkpoint" in done.stdout
    assert "Resumed after step 3" in done.stdout
    assert "Equal, bit for bit" in done.stdout


def test_a_demo_over_an_earlier_one_fails(tmp_path: Path) -> None:
    """Its runs would be resumed, and done before they could be killed."""
    (tmp_path / "undisturbed").mkdir()
    again = run("--dir", tmp_path)
    assert again.returncode == 1
    assert "remove it, or name another directory" in again.stderr


@pytest.mark.parametrize(("code", "last"), [(0, 2), (-9, 2), (0, 3)])
def test_a_training_that_is_not_killed_in_the_save_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, last: int
) -> None:
    demo = module("__main__")
    monkeypatch.setattr(demo, "train", lambda *given: demo.Training(code, losses={last: 0.5}))
    monkeypatch.setattr(sys, "argv", ["demo", "--dir", str(tmp_path), "--steps", "6", "--kill-at", "4"])
    assert demo.main() == 1
    said = f"killed in the save of step 4, but ended with exit code {code} after step {last}"
    assert said in capsys.readouterr().err


def test_every_trace_of_the_interruption_is_named(tmp_path: Path) -> None:
    import everystep
    from everystep import inspect

    demo = module("__main__")
    for name, weight in (("a", 1.0), ("b", 2.0)):
        everystep.save(tmp_path / name, {"w": torch.full((3,), weight), "lr": weight})
    found = inspect.compare(tmp_path / "a", tmp_path / "b")
    first = demo.Training(-9, losses={1: 0.5})
    second, third = demo.Training(0, 0, "x", {2: 0.4}), demo.Training(0, 0, "y", {1: 0.5, 2: 0.3})
    assert demo.differences(found, 1, first, second, third) == [
        "leaf w: bits",
        "value lr",
        "resumed after step 0, not 1",
        "the losses differ",
        "the live states at the end have different digests",
    ]


def test_the_race_leaves_nothing_behind_and_refuses_wrong_bytes(tmp_path: Path) -> None:
    race = module("race")
    assert set(race.race(tmp_path, 1 << 20, 1)) == {"everystep", "torch.save"}
    assert list(tmp_path.iterdir()) == []
    right = {"w": torch.zeros(4)}
    with pytest.raises(AssertionError, match="other bytes"):
        race.require_equal(right, {"w": -right["w"]}, "somebody")  # -0.0 == 0.0, but not bit for bit


def test_the_digest_sees_a_single_bit_and_a_plain_value() -> None:
    train = module("train")
    changed = torch.zeros(3)
    changed.view(torch.int32)[1] = 1
    states = ({"w": torch.zeros(3), "n": 1}, {"w": changed, "n": 1}, {"w": torch.zeros(3), "n": 2})
    assert len({train.digest_of(state) for state in states}) == 3
