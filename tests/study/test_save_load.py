"""The suite of saves and loads: every system is measured; promises are judged where they apply."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from everystep_study.harness import runner
from everystep_study.harness.results import Bar, Result, Row
from everystep_study.mechanisms.competitors import STORING
from everystep_study.mechanisms.plain import Pickle
from everystep_study.suites import save_load
from everystep_study.suites.save_load import Import, SaveLoadSuite
from support.study.bench_results import quiet, result, row, text_of

SAVES = {"raw": 0.5, "raw-huge": 0.4, "everystep": 0.52, "everystep-recycled": 0.5, "safetensors": 1.05}
SAVES |= {"torch-no-crc": 1.0, "torch": 1.6, "dcp": 2.2, "pickle": 1.03, "savez": 1.8}
LOADS = {"raw": 0.45, "raw-huge": 0.33, "everystep": 0.49, "torch": 0.96}


def made_up(**changed: Row) -> Result:
    """Seconds for one GB in which all promises are kept; ``save_torch=row`` replaces a row."""
    found = {
        f"save_{case.replace('-', '_')}": row("save", case, seconds=s, cpu_seconds=0.08, peak_nbytes=40e6)
        for case, s in SAVES.items()
    }
    found |= {f"load_{case.replace('-', '_')}": row("load", case, seconds=s) for case, s in LOADS.items()}
    found["by_hand"] = row("small save", "by-hand", seconds=0.001)
    found["small"] = row("small save", "save", seconds=0.0013)
    found["imported"] = row("import", "import", seconds=0.05, ready_seconds=0.3, heavy_modules=0.0)
    assert changed.keys() <= found.keys()
    return result(*(found | changed).values())


def bars(found: Result, **options: object) -> dict[str, Bar]:
    return {bar.key: bar for bar in SaveLoadSuite(**options).bars(found)}  # type: ignore[arg-type]


def test_a_run_measures_every_system_and_leaves_nothing_behind(tmp_path: Path) -> None:
    suite = SaveLoadSuite(nbytes=2 << 20, rounds=1, small_rounds=2, import_rounds=1)
    found = runner.run(suite, tmp_path, quiet(), check=True)
    for section in ("save", "load"):
        assert [row.case for row in found.section(section)] == list(STORING)
    assert {(row.status, row.reason) for row in found.rows} == {("measured", "")}
    assert [row.case for row in found.section("small save")] == ["by-hand", "save", "checkpointer"]
    assert found.row("import", "import").median("heavy_modules") == 0  # type: ignore[union-attr]
    assert found.facts["state_nbytes"] == pytest.approx(2 << 20, rel=0.01)
    raw = found.row("save", "raw")
    assert raw is not None
    assert not raw.values("cpu_seconds"), "its CPU time is not that of the transfer"
    assert "durable save of 64 KiB" in text_of(suite, found)
    assert list(tmp_path.iterdir()) == []


def test_a_system_that_loads_something_else_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pickle, "load", lambda self: self.subject.put({}))
    suite = SaveLoadSuite(nbytes=2 << 20, rounds=1, systems=("pickle",), small_rounds=1, import_rounds=1)
    found = runner.run(suite, tmp_path, quiet()).row("load", "pickle")
    assert found is not None
    assert "loaded something else than was saved" in found.reason


def test_an_unknown_system_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown system zarr; there are: raw, everystep"):
        SaveLoadSuite(systems=("zarr",)).needs()


def test_promises_that_are_kept_pass() -> None:
    assert {bar.verdict for bar in bars(made_up()).values()} == {"PASS"}


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("save-vs-raw", {"save_raw": row("save", "raw", seconds=0.4)}),
        ("save-vs-torch", {"save_torch": row("save", "torch", seconds=1.2)}),
        ("save-vs-dcp", {"save_dcp": row("save", "dcp", seconds=1.2)}),
        ("save-vs-safetensors", {"save_safetensors": row("save", "safetensors", seconds=0.7)}),
        ("save-vs-torch-no-crc", {"save_torch_no_crc": row("save", "torch-no-crc", seconds=0.7)}),
        ("save-cpu", {"save_everystep": row("save", "everystep", seconds=0.52, cpu_seconds=0.13)}),
        ("load-vs-raw", {"load_raw": row("load", "raw", seconds=0.4)}),
        ("load-vs-torch", {"load_torch": row("load", "torch", seconds=0.6)}),
        (
            "save-memory",
            {"save_everystep_recycled": row("save", "everystep-recycled", seconds=0.5, peak_nbytes=300e6)},
        ),
        ("import-time", {"imported": row("import", "import", seconds=0.16, heavy_modules=0.0)}),
        ("import-light", {"imported": row("import", "import", seconds=0.05, heavy_modules=1.0)}),
        ("latency", {"small": row("small save", "save", seconds=0.0016)}),
    ],
)
def test_a_promise_that_is_broken_fails_alone(key: str, changed: dict[str, Row]) -> None:
    found = bars(made_up(**changed))
    assert [bar.key for bar in found.values() if bar.verdict == "FAIL"] == [key]


def test_many_small_tensors_have_promises_of_their_own() -> None:
    keys = set(bars(made_up(), shape="many-small"))
    assert keys == {"save-vs-safetensors", "save-memory", "import-time", "import-light", "latency"}


def test_warm_loads_and_impossible_speeds_are_not_judged() -> None:
    warm = bars(msgspec.structs.replace(made_up(), temperature="warm"))
    assert (warm["load-vs-raw"].verdict, warm["save-vs-raw"].verdict) == ("not measured", "PASS")
    assert "page cache" in warm["load-vs-torch"].detail
    impossible = bars(made_up(save_raw_huge=row("save", "raw-huge", seconds=0.6)))["save-vs-raw"]
    assert impossible.verdict == "not measured"
    assert "not possible" in impossible.detail


def test_a_promise_whose_peer_is_missing_says_why() -> None:
    absent = Row("save", "", "dcp", "torch DCP", "not installed", "pip install torch")
    assert bars(made_up(save_dcp=absent))["save-vs-dcp"].detail == "torch DCP: not installed"
    assert {bar.verdict for bar in bars(result()).values()} == {"not measured"}
    assert bars(result())["save-vs-torch"].detail == "left out of this run"


def test_ratios_agree_with_the_speeds_beside_them() -> None:
    text = text_of(SaveLoadSuite(), made_up())
    assert "the everystep 1.92 1.92-1.92 0.96 0.08 38 1.00" in text
    assert "the torch 0.62 0.62-0.62 0.31 0.08 38 3.08" in text


def test_by_hand_is_write_fsync_rename_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("write", "fsync", "rename"):
        real = getattr(os, name)

        def recording(*args: object, _real: object = real, _name: str = name) -> object:
            calls.append(_name)
            return _real(*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, recording)
    save_load.save_by_hand(tmp_path, "x", b"bytes" * 1000)
    assert calls == ["write", "fsync", "rename", "fsync"]
    assert (tmp_path / "x").read_bytes() == b"bytes" * 1000
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_import_that_fails_is_an_error_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Import, "_PROGRAM", "raise SystemExit('no luck')")
    with pytest.raises(RuntimeError, match="no luck"):
        Import().measure(None)  # type: ignore[arg-type]
