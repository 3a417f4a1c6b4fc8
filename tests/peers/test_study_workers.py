"""The study's workers with the real frameworks: mechanisms bring back what they saved, probes probe.

One process per framework; torch needs no environment of its own, and is slow for the ordinary tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everystep_study import frameworks
from everystep_study.suites import cost, determinism
from everystep_study.workers import orders
from everystep_study.workers.processes import FrameworkProcess
from support.processes import peers

pytestmark = pytest.mark.peers

WHOLE = ("torch", "tensorflow", "jax", "chainer")


@pytest.fixture
def asked(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FrameworkProcess]:
    name = request.param
    entry = frameworks.FRAMEWORKS[name]
    if entry.environment is not None:
        peers.interpreter(entry.environment)  # fails with the command to run
        monkeypatch.setenv("EVERYSTEP_PEERS", str(peers.FOLDER))
    with FrameworkProcess(name, entry, tmp_path, 300.0) as process:
        yield process


@pytest.mark.parametrize("asked", frameworks.FRAMEWORKS, indirect=True)
def test_every_mechanism_checkpoints_a_training(asked: FrameworkProcess, tmp_path: Path) -> None:
    asked.start()
    model = "gpt2" if asked.hello["models"] == ["gpt2"] else "mlp"
    asked.ask(orders.build, model=model, quick=True, seed=0)
    for mechanism in asked.hello["mechanisms"]:
        key = mechanism["key"]
        assert mechanism["missing"] is None, key
        asked.ask(orders.prepare, 900.0, mechanism=key)
        place = str(tmp_path / f"{key}-train")
        found = asked.ask(cost.train, mechanism=key, durable=True, every=[1], steps=2, directory=place)["1"]
        assert found["saves"] == 2, key
        assert found["seconds"] > 0, key
        for weights_only in (False, True):
            possible = "weights_only_possible" if weights_only else "optimizer_possible"
            if asked.hello["loop"] or not mechanism[possible]:
                continue
            place = str(tmp_path / f"{key}-{weights_only}")
            asked.ask(orders.save, mechanism=key, directory=place, weights_only=weights_only)
            loaded = asked.ask(orders.load, mechanism=key, directory=place, weights_only=weights_only)
            assert loaded["readings"]["equal"] == 1, (key, weights_only)


@pytest.mark.parametrize("asked", WHOLE, indirect=True)
def test_the_probe_repeats_itself_and_every_ingredient_matters(
    asked: FrameworkProcess, tmp_path: Path
) -> None:
    def resume(without: str = "", default: str = "") -> dict[str, float]:
        place = tmp_path / f"resume-{without}{default}"
        place.mkdir()
        return asked.ask(
            determinism.resume, steps=8, seed=0, without=without, default=default, directory=str(place)
        )

    asked.start()
    assert resume()["equal"] == 1
    for key in asked.ask(determinism.ingredients):
        found = resume(without=key)
        assert (found["repeatable"], found["equal"]) == (1, 0), key
    (ours,) = [each["key"] for each in asked.hello["defaults"] if each["ours"]]
    assert resume(default=ours)["equal"] == 1
