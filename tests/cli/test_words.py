"""Numbers and names as people read them."""

from __future__ import annotations

import math

import pytest

from everystep.cli import words


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (250 << 10, "250 KiB"),
        (3 << 50, "3.0 PiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert words.size(nbytes) == text


def test_sizes_beyond_the_largest_unit_stay_in_it() -> None:
    assert words.size(5 << 60) == "5120 PiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7200, "2 h ago"),
        (3e6, "34 d ago"),
        (-5, "in the future"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert words.age(seconds) == text


def test_speeds_and_durations() -> None:
    assert words.speed(2_000_000_000, 1) == "2.00 GB/s"
    assert words.speed(5_000_000, 1) == "5.0 MB/s"
    assert words.duration(0.00123) == "1.23 ms"
    assert words.duration(0.000012) == "12 µs"
    assert words.duration(2.5) == "2.5 s"


def test_counts_and_shapes() -> None:
    assert words.count(1, "leaf", "leaves") == "1 leaf"
    assert words.count(20_000, "leaf", "leaves") == "20,000 leaves"
    assert words.shape((3, 4)) == "[3, 4]"
    assert words.shape(()) == "[]"


def test_numbers_are_short() -> None:
    assert words.number(None) == "-"
    assert words.number(12345) == "12345"
    assert words.number(2**63) == "9.22e+18"
    assert words.number(0.000123456) == "0.000123"
    assert words.number(math.inf) == "inf"


def test_metrics_may_be_anything_a_float_can_be() -> None:
    assert words.metrics({"loss": math.nan, "acc": 0.5}) == "loss nan  acc 0.5"


def test_a_time_no_calendar_has_is_still_printed() -> None:
    assert words.moment(1e30).endswith("s after 1970")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.w", "model.w"),
        ("größe", "größe"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb", "a\\nb"),
        ("a\u202eb", "a\\u202eb"),
        ("a\udcffb", "a\\udcffb"),
    ],
)
def test_names_from_files_cannot_act_on_the_terminal(text: str, shown: str) -> None:
    assert words.plain(text) == shown
