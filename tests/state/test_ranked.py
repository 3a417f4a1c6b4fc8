"""Promise: every way to spread a training over ranks resumes from every other, bit for bit."""

from __future__ import annotations

import pytest
from tests.distributed.launcher import launch, values

from .ranked import LAYOUTS, from_layout_to_layouts


@pytest.mark.parametrize(("source", "ranks"), [*((layout, 2) for layout in LAYOUTS), ("fsdp2", 3)])
def test_every_layout_resumes_from_this_one(source: str, ranks: int) -> None:
    for wrong in values(launch(ranks, from_layout_to_layouts, source, LAYOUTS, timeout=300)):
        assert not wrong
