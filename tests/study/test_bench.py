"""A whole run: from options to result, nothing left behind, and errors that say what to change."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.study import bench, results, room
from holdfast.study.bench import BenchOptions
from holdfast.study.limits import every_peer

MIB = 1 << 20


def quiet() -> Console:
    return Console(file=io.StringIO())


def options(directory: Path, **changed: object) -> BenchOptions:
    defaults: dict[str, object] = {
        "directory": directory,
        "nbytes": 2 * MIB,
        "rounds": 1,
        "small_repetitions": 2,
        "import_repetitions": 1,
    }
    return BenchOptions(**(defaults | changed))  # type: ignore[arg-type]


def test_a_run_measures_every_system_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = bench.run(options(tmp_path), quiet())
    assert {row.system for row in result.rows} == {peer.key for peer in every_peer()}
    for row in result.rows:
        # fio is the one that a developer's machine may lack.
        assert row.status == "measured" or (row.system == results.FIO and row.reason), row
    assert result.problems == ()
    assert result.state_nbytes == pytest.approx(2 * MIB, rel=0.01)
    # Against the raw limit one round of 2 MiB may look better than can be, and is then refused.
    judged = [bar for bar in result.bars if not bar.key.startswith("load") and bar.key != "save-vs-raw"]
    assert {bar.verdict for bar in judged} <= {"PASS", "FAIL"}
    assert list(tmp_path.iterdir()) == []


def test_systems_can_be_chosen(tmp_path: Path) -> None:
    result = bench.run(options(tmp_path, systems=("pickle", "savez")), quiet())
    assert [(row.system, row.operation) for row in result.rows] == [
        ("pickle", "save"),
        ("savez", "save"),
        ("pickle", "load"),
        ("savez", "load"),
    ]


def test_a_run_that_is_interrupted_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        (next(tmp_path.iterdir()) / "half").write_bytes(b"written")
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.measure, "run_rounds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.run(options(tmp_path), quiet())
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_fails_does_not_lose_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(bench.probes, "latency", broken)
    result = bench.run(options(tmp_path, systems=("pickle",)), quiet())
    assert result.latency is None
    assert result.problems == ("small saves failed: OSError: gone",)
    assert result.row("pickle", "save") is not None


def test_an_unknown_system_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown system zarr; there are: raw, holdfast"):
        bench.run(options(tmp_path, systems=("zarr",)), quiet())


def test_a_run_without_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one round"):
        bench.run(options(tmp_path, rounds=0), quiet())


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png or \.svg, not as 'x\.gif'"):
        bench.run(options(tmp_path, plot=tmp_path / "x.gif", nbytes=1 << 60), quiet())


def test_a_disk_that_is_too_small_is_told_before_it_is_filled(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="choose a smaller --size or another directory"):
        bench.run(options(tmp_path, shape="few-large", nbytes=1 << 50), quiet())


def test_memory_that_is_too_small_is_told_before_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_meminfo", lambda: ["MemTotal: 99999999 kB", "MemAvailable: 1024 kB"])
    with pytest.raises(MemoryError, match="choose a smaller --size"):
        bench.run(options(tmp_path), quiet())


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        bench.run(options(tmp_path / "nowhere"), quiet())


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("64k", 65536),
        ("256M", 256 * MIB),
        ("1GiB", 1 << 30),
        ("1.5 GB", 3 << 29),
        ("2T", 2 << 40),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert bench.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1G", "1X", "1 G i B", "many"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        bench.parse_size(text)


def test_command_prints_json_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_probe", lambda options, room: (None, None, ()))  # the defaults take seconds
    picture = tmp_path / "p.png"
    words = [
        str(tmp_path),
        "--size",
        "2M",
        "--rounds",
        "1",
        "--system",
        "pickle",
        "--json",
        "--plot",
        str(picture),
    ]
    code = bench.main(words)
    document = json.loads(capsys.readouterr().out)
    assert code == (1 if "FAIL" in {bar["verdict"] for bar in document["bars"]} else 0)
    assert {row["system"] for row in document["rows"]} == {"pickle"}
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_command_returns_2_and_the_reason_for_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([str(tmp_path), "--system", "zarr"]) == 2
    assert "unknown system zarr" in capsys.readouterr().err


def test_filesystem_of_a_path_is_that_of_its_own_mount() -> None:
    assert room._filesystem(Path("/proc/self")) == "proc"
