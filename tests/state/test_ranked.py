"""Promise: every way to spread a training over ranks resumes from every other, bit for bit."""

from __future__ import annotations

import pytest
from tests.distributed.launcher import launch, values

from .ranked import LAYOUTS, from_layout_to_layouts


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_resumes_from_this_one(source: str) -> None:
    for wrong in values(launch(2, from_layout_to_layouts, source, LAYOUTS, timeout=100)):
        assert not wrong
