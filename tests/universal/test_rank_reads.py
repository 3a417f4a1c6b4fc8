"""Ranks restore straight from the files of another system, and each reads only the bytes that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import everystep
from support.processes.counted_reads import counted_reads
from support.worlds.launcher import launch, values

torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from support.foreign.zero_writer import write_zero3  # noqa: E402


def _model(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(768, 513), torch.nn.Linear(513, 768), torch.nn.Linear(768, 7))


def _restore(path: str, run: str) -> list[tuple[int, int, bool]]:
    """For each way to restore: bytes that this rank read, bytes of its shards, and whether they are right."""
    found = []
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for way in ("load", "start_from"):
        model = fully_shard(_model(1), mesh=mesh)
        with counted_reads() as sizes:
            if way == "load":
                everystep.load(path, into={"model": model}, strict=False)
            else:
                with everystep.Checkpointer(run, {"model": model}) as ckpt:
                    assert ckpt.restore(init_from=path, continue_steps=True) == 5
        own = sum(parameter.to_local().nbytes for parameter in model.parameters())
        truth = _model(0).state_dict()
        right = all(torch.equal(one.full_tensor(), truth[name]) for name, one in model.state_dict().items())
        found.append((sum(sizes), own, right))
    return found


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_every_rank_reads_only_its_own_shards_of_a_zero_3_checkpoint(tmp_path: Path) -> None:
    whole = {name: tensor.detach() for name, tensor in _model(0).named_parameters()}
    path = write_zero3(tmp_path / "zero", whole, ranks=2)
    outcome = values(launch(3, _restore, str(path), str(tmp_path / "run")))
    total = sum(tensor.nbytes for tensor in whole.values())
    for way in range(2):
        assert all(rank[way][2] for rank in outcome), "weights"
        assert sum(rank[way][1] for rank in outcome) == total
        assert [rank[way][0] for rank in outcome] == [rank[way][1] for rank in outcome]


def test_weights_and_moments_of_zero_3_start_a_run(tmp_path: Path) -> None:
    truth = _model(0)
    path = write_zero3(
        tmp_path / "zero", {name: one.detach() for name, one in truth.named_parameters()}, ranks=2
    )
    model = _model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    with everystep.Checkpointer(tmp_path / "run", {"model": model, "optimizer": optimizer}) as ckpt:
        assert ckpt.restore(init_from=path, continue_steps=True) == 5
    assert optimizer.param_groups[0]["lr"] == 0.1
    for one, other in zip(model.parameters(), truth.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["exp_avg"], 2 * other)
        assert torch.equal(optimizer.state[one]["exp_avg_sq"], 3 * other)
        assert optimizer.state[one]["step"] == 5
