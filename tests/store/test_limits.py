"""Large states, many leaves, little memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import everystep
from everystep.engine import choose_backend
from support.processes.memory_use import MEASURE, in_own_process, needs_peak

MIB = 1 << 20
SLACK = 36
"""MiB: what the allocators of Python and numpy keep for themselves."""


@needs_peak
@pytest.mark.parametrize("backend", [None, "buffered"])
def test_a_save_takes_little_memory_whatever_the_size(tmp_path: Path, backend: str | None) -> None:
    """128 MiB, half of it transposed, so that it cannot go from its own memory to the device."""
    script = (
        MEASURE
        + """
    side = 1 << 12
    state = {
        "plain": np.full((side, side), 1.5, np.float32),
        "transposed": np.arange(side * side, dtype=np.float32).reshape(side, side).T,
    }
    options = everystep.Options(
        backend=None if sys.argv[2] == "None" else sys.argv[2], memory_nbytes=32 << 20
    )
    everystep.save(sys.argv[1] + "/small", {"w": np.zeros(3)})  # first-time costs are not the save's
    print("save", growth(lambda: everystep.save(sys.argv[1] + "/c", state, options=options)))
    target = {name: np.empty_like(array) for name, array in state.items()}
    for array in target.values():
        array[...] = 0
    print("load", growth(lambda: everystep.load(sys.argv[1] + "/c", into=target)))
    assert np.array_equal(target["transposed"], state["transposed"])
    """
    )
    found = dict(line.split() for line in in_own_process(script, tmp_path, backend).splitlines())
    assert float(found["save"]) <= 32 + SLACK
    assert float(found["load"]) <= 32 + SLACK


def test_twenty_thousand_leaves(tmp_path: Path, options: everystep.Options) -> None:
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 1 << 62, (20_000, 40))
    state = {"model": {f"block.{n}.weight": whole[n] for n in range(20_000)}}
    info = everystep.save(tmp_path / "c", state, options=options)
    assert info.leaves == 20_000
    found = everystep.load(tmp_path / "c")["model"]
    assert list(found) == list(state["model"])
    assert np.array_equal(np.stack(list(found.values())), whole)
    with everystep.open(tmp_path / "c") as opened:
        assert np.array_equal(opened["model.block.19999.weight"][3:5], whole[19_999, 3:5])


def test_many_large_leaves_each_find_their_congruent_place(tmp_path: Path) -> None:
    """Views into one buffer at every residue: the worst case for the layout."""
    base = torch.arange(40 * MIB // 4, dtype=torch.int32)
    state = {str(n): base[n * MIB // 4 + n * 13 :][: 100_000 + n] for n in range(30)}
    everystep.save(tmp_path / "c", state)
    found = everystep.load(tmp_path / "c")
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)


def test_a_state_of_numpy_alone_never_imports_torch(tmp_path: Path) -> None:
    script = """
        import sys
        import numpy as np
        import everystep
        state = {"w": np.arange(10), "b": [1, "x"]}
        everystep.save(sys.argv[1] + "/c", state)
        found = everystep.load(sys.argv[1] + "/c")
        assert (found["w"] == state["w"]).all()
        everystep.load(sys.argv[1] + "/c", into=state)
        with everystep.open(sys.argv[1] + "/c") as opened:
            opened["w"][2:3]
        assert everystep.verify(sys.argv[1] + "/c").intact
        with everystep.Checkpointer(sys.argv[1] + "/run", state, mode="sync") as checkpointer:
            checkpointer.save(1)
            checkpointer.restore()
        print([name for name in ("torch", "jax", "tensorflow", "sklearn") if name in sys.modules])
    """
    assert in_own_process(script, tmp_path).strip() == "[]"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_leaf_of_five_gigabytes_for_real(tmp_path: Path) -> None:
    """On a real device: offsets beyond 32 bits in writing, reading, slicing, verifying and in safetensors."""
    from safetensors import safe_open

    assert choose_backend(tmp_path) in ("uring", "threads", "buffered")
    count = (5 << 30) // 8 + 1
    array = np.arange(count)
    small = np.arange(1000)
    everystep.save(tmp_path / "c", {"large": array, "small": small})
    assert everystep.verify(tmp_path / "c").intact
    with everystep.open(tmp_path / "c") as opened:
        assert opened["large"][-3:].tolist() == [count - 3, count - 2, count - 1]
        far = (1 << 32) // 8
        assert opened["large"][far - 1 : far + 1].tolist() == [far - 1, far]
    with safe_open(tmp_path / "c" / "r00000.v0.safetensors", "np") as file:
        assert file.get_slice("large")[count - 1 : count].tolist() == [count - 1]
    target = {"large": np.zeros(count, np.int64), "small": np.zeros(1000, np.int64)}
    everystep.load(tmp_path / "c", into=target)
    assert np.array_equal(target["large"], array)
    assert np.array_equal(target["small"], small)
