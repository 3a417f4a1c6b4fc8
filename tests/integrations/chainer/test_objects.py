"""`integrations.chainer` without Chainer: a stand-in for the few classes of it that the module builds on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import everystep


class Serializer:
    def save(self, obj: Any) -> None:
        obj.serialize(self)


class Deserializer:
    def load(self, obj: Any) -> None:
        obj.serialize(self)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`everystep.integrations.chainer`, imported on top of the stand-in."""
    parts = {
        "chainer": {},
        "chainer.backends": {"_cpu": SimpleNamespace(_to_cpu=np.asarray)},
        "chainer.serializer": {"Serializer": Serializer, "Deserializer": Deserializer},
        "chainer.training": {"Extension": object},
    }
    for name, contents in parts.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(contents)
    monkeypatch.setattr(metadata, "version", lambda package: "7.8.1")
    yield import_module("everystep.integrations.chainer")
    for name in [name for name in sys.modules if name.startswith("everystep.integrations.chainer")]:
        del sys.modules[name]
    vars(everystep).pop("chainer", None)


class Link:
    def __init__(self, size: int = 3, fill: float = 0.0) -> None:
        self.weight = np.full((2, size), fill, np.float32)
        self.count: Any = 0
        self.state: Any = None
        self.inner: Link | None = None

    def serialize(self, serializer: Any) -> None:
        self.weight = serializer("W", self.weight)
        self.count = serializer("/count", self.count)
        self.state = serializer("state", self.state)
        if self.inner is not None:
            self.inner.serialize(serializer["/inner/0"])


class Optimizer:
    """Momentum, with the hooks of Chainer's optimizers."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.t = 0
        self.hyperparam = SimpleNamespace(_parent=None, lr=0.5)
        self.hooks: dict[str, Callable[[Any], None]] = {}
        self.rule = SimpleNamespace(state={"v": np.ones((2, 3), np.float32)}, hyperparam=SimpleNamespace())
        self.parameter = SimpleNamespace(array=link.weight, update_rule=self.rule)
        self.target = SimpleNamespace(
            params=lambda: [self.parameter], namedparams=lambda: [("/W", self.parameter)]
        )

    def add_hook(self, hook: Callable[[Any], None], name: str, timing: str) -> None:
        assert timing == "pre"
        self.hooks[name] = hook

    def remove_hook(self, name: str) -> None:
        del self.hooks[name]

    def update(self) -> None:
        for hook in self.hooks.values():
            hook(self)
        self.t += 1
        self.rule.state["v"] *= np.float32(0.9)
        self.link.weight -= (
            np.float32(self.hyperparam.lr) * self.rule.state["v"] * np.float32(np.random.rand())
        )

    def serialize(self, serializer: Any) -> None:
        self.t = serializer("t", self.t)
        self.rule.state["v"] = serializer["/W"]("v", self.rule.state["v"])


class Trainer:
    elapsed_time = 12.5

    def __init__(self, extension: Any) -> None:
        self.link = Link()
        self.optimizer = Optimizer(self.link)
        self.updater = SimpleNamespace(
            iteration=0, get_all_optimizers=lambda: {"main": self.optimizer}, _iterators={}
        )
        self.observation = {"main/loss": np.float32(0.25), "text": "no number"}
        self._extension = extension
        self._snapshot_elapsed_time = 0.0

    def serialize(self, serializer: Any) -> None:
        self.updater.iteration = serializer("iteration", self.updater.iteration)
        self.link.serialize(serializer["model"])
        self.optimizer.serialize(serializer["optimizer"])
        self._snapshot_elapsed_time = serializer("_snapshot_elapsed_time", self._snapshot_elapsed_time)

    def run(self, iterations: int) -> bytes:
        self._extension.initialize(self)
        while self.updater.iteration < iterations:
            self.optimizer.update()
            self.updater.iteration += 1
            self.optimizer.hyperparam.lr *= 0.75
            self._extension(self)
        self._extension.finalize()
        return self.link.weight.tobytes() + np.random.get_state()[1].tobytes()


def test_an_object_comes_back_with_names_and_types(module: Any, tmp_path: Path) -> None:
    saved = Link(fill=3.0)
    saved.count, saved.state, saved.inner = np.float32(2), "text", Link(fill=4.0)
    module.save(tmp_path / "one", saved)
    with everystep.open(tmp_path / "one") as opened:
        assert sorted(opened.leaves) == ["W", "inner.0.W"]
    target = Link()
    target.inner = Link()
    weight = target.weight
    module.load(tmp_path / "one", target)
    assert target.weight is weight
    assert (weight == 3).all()
    assert (type(target.count), target.count, target.state) == (np.float32, 2, "text")
    assert (target.inner.weight == 4).all()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (lambda: Link(4), r"W: checkpoint float32\[2, 3\], target float32\[2, 4\]"),
        (lambda: Link(1), r"W: checkpoint float32\[2, 3\], target float32\[2, 1\]"),  # numpy would broadcast
        (
            lambda: SimpleNamespace(serialize=lambda serializer: serializer("X", 0)),
            "X: not in the checkpoint",
        ),
        (
            lambda: SimpleNamespace(serialize=lambda serializer: serializer("count", 0)),
            "W: in the checkpoint only",
        ),
        (
            lambda: SimpleNamespace(serialize=lambda serializer: serializer("count", "")),
            "count: checkpoint int",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    module: Any, tmp_path: Path, target: Callable[[], Any], text: str
) -> None:
    module.save(tmp_path / "one", Link())
    with pytest.raises(everystep.StateMismatch, match=text):
        module.load(tmp_path / "one", target())
    with pytest.raises(everystep.StateMismatch, match="nothing at 'inner'"):
        module.load(tmp_path / "one", Link(), at="inner")


def test_a_training_resumes_with_rates_and_random_numbers(module: Any, tmp_path: Path) -> None:
    def run(name: str, iterations: int) -> bytes:
        np.random.seed(1)
        trainer = Trainer(module.snapshot(tmp_path / name))
        found = trainer.run(iterations)
        assert trainer.optimizer.hooks == {}
        return found

    run("halves", 4)
    with everystep.open(tmp_path / "halves") as opened:
        assert opened.metrics == {"main/loss": 0.25, "elapsed_time": 12.5}
        assert opened.values["hyperparameters.main.own.all.lr"] == 0.5 * 0.75**4
    assert run("halves", 8) == run("whole", 8)
    events = [
        line for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines() if "saved" in line
    ]
    assert all('"mode":"overlap"' in line for line in events), events


def test_a_trainer_that_does_not_fit_leaves_the_run_closed(module: Any, tmp_path: Path) -> None:
    Trainer(module.snapshot(tmp_path / "run")).run(2)
    other = Trainer(module.snapshot(tmp_path / "run"))
    other.link = Link(5)
    with pytest.raises(everystep.StateMismatch, match=r"model\.W"):
        other.run(3)
    with everystep.Checkpointer(tmp_path / "run", {}, preemption=False):
        pass
