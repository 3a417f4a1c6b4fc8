"""What "bounded" means: the peak of memory during a save does not follow the size of the state.

`Options.memory_nbytes` is for bytes on their way; on top comes a small constant per leaf. Each case is one
whose bytes have to be changed, made or described on the way, so that a copy of all of them would be easy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes.memory_use import MEASURE, in_own_process, needs_peak

BUDGET = 16
"""MiB, of `Options.memory_nbytes`; each state has 128."""
SLACK = 36
"""MiB: what the allocators of Python, numpy and torch keep for themselves."""

SAVES = """
    import shutil
    import torch

    base = torch.zeros(2048, 8192, dtype=torch.complex64)
    base[17, 23] = 1 + 2j
    views = {
        "conjugate": lambda: base.conj(),
        "conjugate, transposed": lambda: base.conj().T,
        "imaginary part of a conjugate": lambda: base.conj().imag,
        "negated": lambda: torch._neg_view(torch.view_as_real(base)),
        "bytes": lambda: bytes(128 << 20),
        "bytearray": lambda: bytearray(128 << 20),
    }
    path, budget, mode, *kinds = sys.argv[1:]
    options = everystep.Options(memory_nbytes=int(budget) << 20)

    def save(state):
        with everystep.Checkpointer(path, state, mode=mode, options=options) as checkpointer:
            checkpointer.save(1)

    save([torch.zeros(1 << 20, dtype=torch.complex64).conj(), bytes(3)])  # what is paid once per process
    for kind in kinds:
        shutil.rmtree(path)
        state = [views[kind]()]
        print(kind, growth(lambda: save(state)), sep="=")
        (found,) = everystep.load(path)
        assert type(found) is type(state[0]), kind
        assert torch.equal(found, state[0]) if isinstance(found, torch.Tensor) else found == state[0], kind
        del found, state
"""


def peaks(path: Path, mode: str, *kinds: str) -> dict[str, float]:
    """MiB that the save of each kind of state takes."""
    said = in_own_process(MEASURE + SAVES, path / "run", BUDGET, mode, *kinds)
    found = dict(line.split("=") for line in said.splitlines())
    assert set(found) == set(kinds)
    return {kind: float(grown) for kind, grown in found.items()}


@needs_peak
@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("sync", ["conjugate", "imaginary part of a conjugate"]),
        ("snapshot", ["conjugate, transposed", "negated"]),
    ],
)
def test_the_sign_of_a_view_is_resolved_a_window_at_a_time(
    tmp_path: Path, mode: str, kinds: list[str]
) -> None:
    for kind, grown in peaks(tmp_path, mode, *kinds).items():
        assert grown < BUDGET + SLACK, kind


MANY = """
    count = 30_000
    state = {f"layers.{n // 10}.block.{n % 10}.weight": np.zeros(16, np.float32) for n in range(count)}
    small = {"w": np.zeros(16, np.float32)}
    everystep.save(sys.argv[1] + "/small", small)
    everystep.load(sys.argv[1] + "/small", into=small)
    print("save", growth(lambda: everystep.save(sys.argv[1] + "/c", state)) * 2**20 / count)
    print("load", growth(lambda: everystep.load(sys.argv[1] + "/c", into=state)) * 2**20 / count)
"""


@needs_peak
def test_a_leaf_costs_no_more_than_its_description(tmp_path: Path) -> None:
    """Bytes per leaf of 64, with names of 25 characters. That of the engine's windows is in it, too."""
    found = dict(line.split() for line in in_own_process(MEASURE + MANY, tmp_path).splitlines())
    assert float(found["save"]) < 1850
    assert float(found["load"]) < 1950


@needs_peak
def test_large_bytes_pass_through_the_windows_too(tmp_path: Path) -> None:
    for kind, grown in peaks(tmp_path, "sync", "bytes", "bytearray").items():
        assert grown < BUDGET + SLACK, kind
