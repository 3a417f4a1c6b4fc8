"""Promise: every way to spread a training over ranks resumes from every other, bit for bit."""

from __future__ import annotations

import pytest

from support.worlds.launcher import launch, values
from support.worlds.ranked_trainings import LAYOUTS, from_layout_to_layouts, ties_under_fsdp1

# `distributed/test_layouts.py` has all of them as sources, on disk.
USUAL = ("plain", "zero", "fsdp2", "fsdp1 flat")
SOURCES = [
    *(
        (layout, 2) if layout in USUAL else pytest.param(layout, 2, marks=pytest.mark.slow)
        for layout in LAYOUTS
    ),
    ("fsdp2", 3),
]


@pytest.mark.parametrize(("source", "ranks"), SOURCES)
def test_every_layout_resumes_from_this_one(source: str, ranks: int) -> None:
    for wrong in values(launch(ranks, from_layout_to_layouts, source, LAYOUTS, timeout=300)):
        assert not wrong


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_tied_weights_are_tied_under_fsdp1_as_without_it(use_orig_params: bool) -> None:
    for plain, *wrapped in values(launch(2, ties_under_fsdp1, use_orig_params)):
        assert plain == {"model.inner.0.weight": "model.up.weight"}
        assert wrapped == [plain, plain]
