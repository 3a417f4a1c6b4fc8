"""Any order of saving, restoring, damaging, reading and reopening, against the model."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import everystep
from everystep import Checkpointer, Keep
from everystep.store import step_name
from support.crashes.run_model import Model, hurt

steps = st.integers(0, 9)
metrics = st.dictionaries(
    st.sampled_from(["loss", "acc"]), st.integers(0, 4).map(float) | st.just(float("nan")), max_size=2
)
keeps = st.builds(
    Keep,
    last=st.integers(1, 3),
    every=st.none() | st.integers(2, 4),
    best=st.none() | st.sampled_from([("loss", "min", 1), ("acc", "max", 2)]),
)
ways = st.sampled_from(
    [
        everystep.Options(),
        everystep.Options(small_nbytes=0, memory_nbytes=0),
        everystep.Options("buffered", small_nbytes=0),
    ]
)


class Runs(RuleBasedStateMachine):
    """Every save gets a version of its own, which its arrays and values carry."""

    @initialize(keep=keeps, way=ways, large=st.booleans())
    def begin(self, keep: Keep, way: everystep.Options, large: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.run = self.folder / "run"
        self.model = Model(keep)
        self.way = way
        self.elements = 200_000 if large else 500
        self.state: dict[str, Any] = {"w": np.zeros(self.elements), "version": -1, "padding": ""}
        self.version = 0
        self.retired = 0
        self.readers: list[tuple[everystep.Checkpoint, int]] = []
        self.open()

    def open(self, *, start_over: bool = False) -> None:
        self.started = not start_over
        self.checkpointer = Checkpointer(
            self.run,
            self.state,
            keep=self.model.keep,
            options=self.way,
            mode="sync",
            start_over=start_over,
        )

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for reader, _ in self.readers:
                reader.close()
            self.checkpointer.close()
            shutil.rmtree(self.folder)

    def is_version(self, state: dict[str, Any], version: int) -> bool:
        return state["version"] == version and bool((state["w"] == version).all())

    @rule(step=steps, metrics=metrics, padding=st.integers(0, 9000))
    def save(self, step: int, metrics: dict[str, float], padding: int) -> None:
        self.version += 1
        self.state["w"][:] = self.version
        self.state["version"], self.state["padding"] = self.version, "x" * padding
        refused = self.model.refuses(step)
        if refused is not None:
            with pytest.raises(refused):
                self.checkpointer.save(step, metrics=metrics)
            return
        self.checkpointer.save(step, metrics=metrics)
        self.started = True
        self.retired = self.model.save(step, self.version, metrics)

    @rule()
    def restore(self) -> None:
        if not self.started:
            with pytest.raises(ValueError, match="contradict"):
                self.checkpointer.restore()
            return
        expected, passed = self.model.restore()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if expected is None:
                with pytest.raises(everystep.CorruptCheckpoint, match="none of the"):
                    self.checkpointer.restore()
            else:
                assert self.checkpointer.restore() == expected
        assert [f"step {step}:" in str(w.message) for step, w in zip(passed, caught, strict=True)] == [
            True
        ] * len(passed)
        if expected in self.model.entries:
            assert self.is_version(self.state, self.model.entries[expected].version)

    @rule(step=steps)
    def restore_one(self, step: int) -> None:
        entry = self.model.entries.get(step)
        if not self.started:
            with pytest.raises(ValueError, match="contradict"):
                self.checkpointer.restore(step)
        elif entry is None:
            with pytest.raises(everystep.CheckpointNotFound):
                self.checkpointer.restore(step)
        elif entry.damage is not None:
            with pytest.raises(everystep.CorruptCheckpoint):
                self.checkpointer.restore(step)
        else:
            self.model.restore_one(step)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert self.checkpointer.restore(step) == step
            assert len(caught) == bool(self.model.superseded)
            assert self.is_version(self.state, entry.version)

    @precondition(lambda self: any(entry.damage is None for entry in self.model.entries.values()))
    @rule(data=st.data(), kind=st.sampled_from(["shard", "manifest", "missing", "truncated"]))
    def damage(self, data: st.DataObject, kind: str) -> None:
        held = {reader.id for reader, _ in self.readers}
        whole = [step for step, entry in self.model.entries.items() if entry.damage is None]
        step = data.draw(st.sampled_from(whole))
        with everystep.open(self.run / step_name(step)) as opened:
            if opened.id in held:
                return  # then its reader would rightly see the damage
        hurt(self.run / step_name(step), kind)
        self.model.entries[step].damage = kind

    @rule(start_over=st.booleans())
    def reopen(self, start_over: bool) -> None:
        self.checkpointer.close()
        self.model.reopen(start_over=start_over)
        self.retired = 0
        self.open(start_over=start_over)

    @precondition(lambda self: len(self.readers) < 3)
    @rule(step=steps)
    def open_reader(self, step: int) -> None:
        entry = self.model.entries.get(step)
        if entry is not None and entry.damage is None:
            self.readers.append((everystep.open(self.run / step_name(step)), entry.version))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def close_reader(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.readers) - 1))
        reader, version = self.readers.pop(number)
        assert self.is_version(reader.load(), version)
        reader.close()

    @rule(step=steps)
    def verify(self, step: int) -> None:
        entry = self.model.entries.get(step)
        if entry is not None:
            try:
                intact = everystep.verify(self.run / step_name(step)).intact
            except everystep.errors.IncompleteCheckpoint:  # a small one that lost its only file
                intact = entry.damage != "missing"
            assert intact == (entry.damage is None)

    @invariant()
    def the_run_holds_what_it_should(self) -> None:
        assert self.checkpointer.steps == sorted(self.model.entries)
        assert self.checkpointer.last_durable == self.model.last_durable

    @invariant()
    def nothing_piles_up(self) -> None:
        left = [path.name for path in self.run.iterdir() if path.name.endswith((".partial", ".retired"))]
        # One spare, what the last save gave up, and what readers hold.
        assert len(left) <= 1 + self.retired + len(self.readers)
        assert not [name for name in left if name.endswith(".partial")]


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None
)
