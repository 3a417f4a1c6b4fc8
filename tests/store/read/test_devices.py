"""`load(device=...)`: fresh tensors on a device. (``meta`` stands for one that is not the CPU.)"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import everystep
from everystep.store.read import leaf_reader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tied = torch.arange(1000.0)
    state = {"a": tied, "b": tied, "c": torch.ones(3, 5), "n": np.arange(4), "step": 3}
    everystep.save(tmp_path / "one", state)
    return tmp_path / "one"


def test_tensors_go_to_the_device_and_arrays_and_values_stay(path: Path) -> None:
    loaded = everystep.load(path, device="meta")
    assert {loaded[name].device.type for name in "abc"} == {"meta"}
    assert loaded["a"] is loaded["b"], "tied tensors stay tied"
    assert isinstance(loaded["n"], np.ndarray)
    assert loaded["step"] == 3


@pytest.mark.parametrize("batch_nbytes", [1, 4100, 1 << 20])
def test_batches_of_any_size_give_the_same(
    path: Path, batch_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaf_reader, "_BATCH_NBYTES", batch_nbytes)
    loaded = everystep.load(path, device=torch.device("cpu"))
    assert torch.equal(loaded["a"], torch.arange(1000.0))
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(loaded["c"], torch.ones(3, 5))


def test_a_device_goes_with_fresh_tensors_only(path: Path) -> None:
    with pytest.raises(TypeError, match="device= goes with fresh arrays"):
        everystep.load(path, {"a": torch.zeros(1000)}, device="cpu", strict=False)
    with pytest.raises(TypeError, match="device= is for torch tensors"):
        everystep.load(path, device="cpu", framework="numpy")


def test_options_choose_the_backend_and_bound_the_memory_of_a_read(path: Path) -> None:
    options = everystep.Options(backend="buffered", memory_nbytes=1 << 20)
    tuning = options.reading()
    assert tuning.backend == "buffered"
    assert 3 * tuning.window_nbytes * tuning.depth <= 1 << 20
    assert torch.equal(everystep.load(path, options=options)["c"], torch.ones(3, 5))
    with everystep.open(path, options=options) as checkpoint:
        assert torch.equal(checkpoint["a"][5:7], torch.tensor([5.0, 6.0]))
    with pytest.raises(TypeError, match="options must be"):
        everystep.open(path, options="fast")  # type: ignore[arg-type]
