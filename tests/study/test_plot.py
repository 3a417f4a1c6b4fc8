"""The picture is a valid file of the kind its name says, and shows every system."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from holdfast.study import plot, results
from holdfast.study.results import Row
from support.bench_results import TITLES, result, rows


def words(svg: Path) -> str:
    return " ".join(
        "".join(node.itertext()) for node in ElementTree.parse(svg).iter() if node.tag.endswith("text")
    )


def test_png_is_a_picture_with_something_on_it(tmp_path: Path) -> None:
    path = tmp_path / "bench.png"
    plot.draw(result(), path)
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width > image.height > 400
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert (0x0B, 0x72, 0x85) in colours  # Holdfast's bar


def test_svg_names_every_system_and_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "bench.SVG"
    plot.draw(result(), path)
    said = words(path)
    for system, title in TITLES.items():
        if system != results.RAW:
            assert title in said
    assert "raw device limit 2.00" in said
    assert "raw device limit 2.20" in said
    assert "3.1×" in said  # noqa: RUF001


def test_what_is_missing_is_shown_as_missing(tmp_path: Path) -> None:
    absent = [
        Row(results.DCP, "torch DCP", operation, "not installed", "pip install torch")
        for operation in ("save", "load")
    ]
    path = tmp_path / "bench.svg"
    plot.draw(result(rows(save_dcp=absent[0], load_dcp=absent[1])), path)
    assert words(path).count("not installed") == 2


def test_a_run_without_the_raw_limit_or_without_anything_can_be_drawn(tmp_path: Path) -> None:
    plot.draw(result([r for r in rows() if r.system != results.RAW]), tmp_path / "a.svg")
    plot.draw(result([]), tmp_path / "b.svg")
    assert "raw device limit" not in words(tmp_path / "a.svg")


def test_another_suffix_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png or \.svg, not as 'bench\.jpg'"):
        plot.draw(result(), tmp_path / "bench.jpg")


def test_matplotlib_and_torch_are_not_imported_before_they_are_needed() -> None:
    probe = (
        "import sys, holdfast.study.bench; "
        "print([name for name in ('torch', 'matplotlib', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
