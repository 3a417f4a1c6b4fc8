"""The temperature that is reported is the one the kernel sees, not the one that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystep_study.harness import cache

PAGES = 64


def warm_file(directory: Path, name: str = "file") -> Path:
    path = directory / name
    path.write_bytes(bytes(4096 * PAGES))
    path.read_bytes()
    return path


def test_a_file_just_written_is_all_in_memory(tmp_path: Path) -> None:
    assert cache.resident_fraction([warm_file(tmp_path)]) == 1.0


def test_looking_does_not_warm(tmp_path: Path) -> None:
    path = warm_file(tmp_path)
    cache.empty([path])
    first = cache.resident_fraction([path])
    assert cache.resident_fraction([path]) == first


def test_temperature_is_what_the_kernel_sees_afterwards(tmp_path: Path) -> None:
    path = warm_file(tmp_path)
    temperature, method = cache.empty([path])
    fraction = cache.resident_fraction([path])
    assert fraction is not None
    # Which of the two it is depends on the filesystem below tmp_path: tmpfs forgets nothing.
    assert (temperature, method) == (
        ("cold", "fadvise") if fraction <= 0.01 else ("warm", "the page cache could not be emptied")
    )


def test_a_cache_that_stays_full_is_called_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "forget", lambda file: None)
    assert cache.empty([warm_file(tmp_path)])[0] == "warm"


def test_a_drop_that_root_asked_for_but_did_not_happen_is_called_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_drop_everything", lambda: True)
    assert cache.empty([warm_file(tmp_path)])[0] == "warm"


def test_without_mincore_nothing_is_called_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_resident_pages", lambda file: None)
    assert cache.empty([warm_file(tmp_path)])[0] == "warm"


def test_fraction_is_over_all_files_by_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"a": (0, 90), "b": (10, 10)}
    monkeypatch.setattr(cache, "_resident_pages", lambda file: pages[file.name])
    assert cache.resident_fraction([tmp_path / "a", tmp_path / "b"]) == 0.1


def test_empty_files_are_neither_warm_nor_in_the_way(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert cache.resident_fraction([empty]) == 0.0
