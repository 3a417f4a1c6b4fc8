"""The example of layouts: a checkpoint in Megatron's form goes on in other layouts with the same losses."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

EXAMPLE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "examples/layouts/compare.py"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["tp=1", "pp=2,fsdp=2"])
def test_another_layout_goes_on_with_the_same_losses(tmp_path: Path, layout: str) -> None:
    curves = EXAMPLE["compare"](tmp_path, [layout], steps=8)
    assert sorted(curves[""]) == list(range(1, 9))
    assert sorted(curves[layout]) == [5, 6, 7, 8]
    _, fine = EXAMPLE["table"](curves)
    assert fine


def test_a_loss_that_differs_is_noticed() -> None:
    curves = {"": {1: 2.0, 2: 1.5}, "dp=2": {2: 1.5001001}}
    shown, fine = EXAMPLE["table"](curves)
    assert not fine
    assert "| dp=2 | 2 to 2 | 1.0e-04 | 0 of 1 |" in shown
    curves["dp=2"][2] = 1.5
    assert EXAMPLE["table"](curves)[1]
