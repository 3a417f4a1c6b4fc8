"""The two small costs: what is done by hand is really the shortest durable way; imports are first imports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.study import probes


def test_by_hand_is_write_fsync_rename_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("write", "fsync", "rename"):
        real = getattr(os, name)

        def recording(*args: object, _real: object = real, _name: str = name) -> object:
            calls.append(_name)
            return _real(*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, recording)
    probes.by_hand(tmp_path, "x", b"bytes" * 1000)
    assert calls == ["write", "fsync", "rename", "fsync"]
    assert (tmp_path / "x").read_bytes() == b"bytes" * 1000
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_latency_measures_all_three_ways_and_leaves_nothing(tmp_path: Path) -> None:
    taken = probes.latency(tmp_path, repetitions=3)
    assert (taken.nbytes, taken.repetitions) == (65536, 3)
    assert min(taken.by_hand.low, taken.save.low, taken.checkpointer.low) > 0
    assert list(tmp_path.iterdir()) == []


def test_import_is_measured_in_a_new_interpreter_and_brings_no_framework() -> None:
    cost = probes.import_cost(repetitions=2)
    assert cost.repetitions == 2
    assert 0 < cost.import_seconds.median <= cost.ready_seconds.median
    assert cost.heavy_modules == ()


def test_a_framework_that_comes_along_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "HEAVY", ("sys", "no_such_framework"))
    assert probes.import_cost(repetitions=1).heavy_modules == ("sys",)


def test_an_import_that_fails_is_an_error_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_IMPORT_PROBE", "raise SystemExit('no luck {heavy}')")
    with pytest.raises(RuntimeError, match="no luck"):
        probes.import_cost(repetitions=1)
