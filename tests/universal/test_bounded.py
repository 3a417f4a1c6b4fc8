"""A conversion takes bounded memory, however large the checkpoint and its parameters are."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes.memory_use import MEASURE, in_own_process, needs_peak

torch = pytest.importorskip("torch")

from support.foreign.zero_writer import write_zero3  # noqa: E402

CONVERT = """
    from everystep import universal

    small, large, out = sys.argv[1:]
    for budget in 64, 256:
        options = everystep.Options(memory_nbytes=budget << 20)
        universal.convert(small, f"{out}/small{budget}", options=options)  # what is paid once per process
        print(growth(lambda: universal.convert(large, f"{out}/{budget}", options=options)))
"""


@needs_peak
def test_a_conversion_keeps_to_its_memory(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    weights = {f"h.{n}.weight": torch.randn(1536, 4096, generator=made) for n in range(4)}  # 24 MiB each
    large = write_zero3(tmp_path / "large", weights, ranks=2)  # 288 MiB with its moments
    small = write_zero3(tmp_path / "small", {"weight": torch.ones(512, 512)}, ranks=2)
    tight, usual = map(float, in_own_process(MEASURE + CONVERT, small, large, tmp_path / "out").split())
    assert tight < 64 + 32
    assert usual < 200
