"""States as trainings have them, and how to compare what came back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from everystep.integrations.dcp import Reader, Writer
from everystep.store.read.checkpoint import open_newest


class Odd:
    """Something that only pickle can hold."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def model(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer, after a step."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 7))
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.25 + seed)
    made(torch.randn(5, 20)).square().sum().backward()
    optimizer.step()
    return made, optimizer


def everything(seed: int = 0) -> dict[str, Any]:
    """All kinds of entries that DCP takes apart, and those that it does not."""
    torch.manual_seed(seed)
    weights, moments = get_state_dict(*model(seed))
    return {
        "model": weights,
        "optimizer": moments,
        "progress": {
            "epoch": 3 + seed,
            "rate": 0.1,
            "nan": float("nan"),
            "name": "run",
            "pair": (1, 2.5),
            "losses": [0.5, 0.25],
            "none": None,
            "big": 2**70,
            "odd": Odd(seed),
        },
        "mixed": [torch.arange(4) + seed, {"inner": 5}, "text"],
        "scalar": torch.tensor(3.5 + seed),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(6, 4).t(),
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "$dollar": {"$key": torch.ones(2) * seed, "plain": 1},
        "wide": torch.randn(300, 401),
    }


def blank(value: Any) -> Any:
    """The same places, with nothing of the contents."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, (dict, torch.Tensor)) for item in value):
        return [blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "nothing yet"


def assert_same(found: Any, wanted: Any, place: str = "state") -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), place
        for key in wanted:
            assert_same(found[key], wanted[key], f"{place}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted), place
        assert len(found) == len(wanted), place
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{place}.{number}")
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, place
        assert torch.equal(found, wanted), place
    else:
        assert type(found) is type(wanted), place
        assert found == wanted or (found != found and wanted != wanted), place


def save(state: dict[str, Any], path: Path | str, **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(path, **options), no_dist=True)


def load(state: dict[str, Any], path: Path | str, **options: Any) -> dict[str, Any]:
    """The blank of a state, filled."""
    target: dict[str, Any] = blank(state)
    dcp.load(target, storage_reader=Reader(path, **options), no_dist=True)
    return target


def flip_in(shard: Path, leaf: str) -> None:
    """Damages a leaf in a file, by one bit."""
    with open_newest(shard.parent) as checkpoint:
        stored = {entry.name: entry for entry in checkpoint._parts[int(shard.name[1:6])].leaves}[leaf]
    data = bytearray(shard.read_bytes())
    data[stored.fragments[0].offset + stored.fragments[0].nbytes // 2] ^= 1
    shard.write_bytes(data)


def failures(error: BaseException) -> dict[int, BaseException]:
    """What ranks raised, of DCP's exception."""
    assert type(error).__name__ == "CheckpointException"
    return {rank: wrapped[0] for rank, wrapped in error.failures.items()}  # type: ignore[attr-defined]
