"""Volumes that only one node sees: what two nodes have saved, they restore, each byte stored once."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import everystep
from everystep.cli.app import app
from everystep.store.read.checkpoint import open_newest
from support.crashes.error_kinds import kind_of
from support.worlds.launcher import launch, values
from support.worlds.nodes import Node, missing, two_nodes

TIMEOUT = 60.0
WORLD = 4
NBYTES = 24 << 20
"""Of the replicated array: each rank writes a share of several messages."""


class Site:
    """Two nodes, each with a disk of its own at the same path, and a directory that both see."""

    def __init__(self, folder: Path) -> None:
        self.volume = folder / "volume"
        self.run = folder / "run"
        self._disks = folder / "disks"
        self._nothing = folder / "nothing"
        for path in (self.volume, self._nothing, *map(self.disk, range(2))):
            path.mkdir(parents=True)

    def disk(self, number: int) -> Path:
        return self._disks / str(number)

    def plug(self, nodes: Sequence[Node], disks: Sequence[int] = (0, 1)) -> None:
        """Each node sees its disk as the volume, and no other."""
        for node, disk in zip(nodes, disks, strict=True):
            node.mount(self.disk(disk), self.volume)
            node.mount(self._nothing, self._disks)

    def shards(self, disk: int) -> list[Path]:
        return sorted(self.disk(disk).rglob("*.safetensors"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    why = missing()
    if why:
        pytest.skip(f"two nodes cannot be made here: {why}")
    return Site(tmp_path)


@pytest.fixture
def nodes(site: Site) -> Iterator[tuple[Node, Node]]:
    with two_nodes() as made:
        site.plug(made)
        yield made


def _replicated(steps: int) -> dict[str, Any]:
    import torch

    return {"w": np.arange(NBYTES // 4, dtype=np.float32) + steps, "small": torch.full((7,), float(steps))}


def _checkpointer(run: Path, state: Any, volume: Path, last: int = 2) -> everystep.Checkpointer:
    return everystep.Checkpointer(
        run,
        state,
        mode="sync",
        keep=everystep.Keep(last=last),
        options=everystep.Options(volumes=[volume]),
        timeout=TIMEOUT,
        preemption=False,
    )


def _save_replicated(run: Path, volume: Path, steps: int) -> str:
    state = _replicated(0)
    with _checkpointer(run, state, volume) as checkpointer:
        for step in range(1, steps + 1):
            state["w"] += 1
            state["small"] += 1
            checkpointer.save(step)
    return socket.gethostname()


def _restore_replicated(run: Path, volume: Path) -> int:
    """The step that was restored, exactly."""
    state = _replicated(0)
    with _checkpointer(run, state, volume) as checkpointer:
        step = checkpointer.restore()
    expected = _replicated(step)
    assert np.array_equal(state["w"], expected["w"])
    assert state["small"].equal(expected["small"])
    return step


def _resume_replicated(run: Path, volume: Path, steps: int) -> tuple[int, int]:
    """Goes on from the last step to this one; where it began, and what a load of its own finds in the end."""
    state = _replicated(0)
    with _checkpointer(run, state, volume) as checkpointer:
        began = checkpointer.restore()
        for step in range(began + 1, steps + 1):
            state["w"] += 1
            state["small"] += 1
            checkpointer.save(step)
    loaded = _replicated(0)
    everystep.load(run, loaded, timeout=TIMEOUT)
    assert np.array_equal(loaded["w"], _replicated(steps)["w"])
    return began, int(loaded["small"][0])


def test_what_two_nodes_saved_to_volumes_of_their_own_they_resume_from(
    site: Site, nodes: Sequence[Node]
) -> None:
    hosts = values(launch(WORLD, _save_replicated, site.run, site.volume, 3, nodes=nodes))
    assert hosts == ["node-a", "node-a", "node-b", "node-b"]
    # Every byte once, half of them on each node.
    kept = [sum(path.stat().st_size for path in site.shards(disk)) for disk in range(2)]
    assert kept[0] == pytest.approx(kept[1], rel=0.01)
    with everystep.open(site.run) as checkpoint:
        assert checkpoint.stored_nbytes == pytest.approx(NBYTES, rel=0.01)

    resumed = launch(WORLD, _resume_replicated, site.run, site.volume, 5, nodes=nodes)
    assert values(resumed) == [(3, 5)] * WORLD
    # Retention goes on with what was there before, of which rank 0 sees only its own node's.
    assert sorted(path.name for path in site.run.glob("step-*")) == ["step-000000000004", "step-000000000005"]


def _restore_then_damage(run: Path, volume: Path) -> tuple[int, int, list[str]]:
    """What is restored, and once more after a shard that one node sees was damaged; the warnings."""
    import torch.distributed as dist

    first = _restore_replicated(run, volume)
    if dist.get_rank() == 0:
        with open_newest(run) as checkpoint:
            (file,) = checkpoint._parts[WORLD - 1].files
        path = os.path.join(str(file.volume), file.name)
        with open(path, "r+b") as opened:
            opened.seek(file.nbytes // 2)
            opened.write(b"damage")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = _restore_replicated(run, volume)
    return first, second, [str(item.message) for item in caught]


def _refused(run: Path, volume: Path) -> list[tuple[str, str]]:
    """How a restore and a load end that cannot succeed."""
    found = []
    for load in (
        lambda: _restore_replicated(run, volume),
        lambda: everystep.load(run, _replicated(0), timeout=TIMEOUT),
        lambda: everystep.load(run, process_group="none"),
    ):
        with pytest.raises(everystep.EverystepError) as caught:
            load()
        found.append((kind_of(caught.value), str(caught.value)))
    return found


def test_a_rank_that_sees_a_shard_reads_it_for_the_others_whatever_its_host_is_called(
    site: Site,
) -> None:
    with two_nodes(("same", "other")) as nodes:
        site.plug(nodes)
        values(launch(WORLD, _save_replicated, site.run, site.volume, 3, nodes=nodes))
    # The disks have changed places, and both hosts have one name, as containers may: the name under which a
    # shard was written tells neither of them whether it sees it.
    with two_nodes(("same", "same")) as nodes:
        site.plug(nodes, (1, 0))
        found = values(launch(WORLD, _restore_then_damage, site.run, site.volume, nodes=nodes))
    for first, second, told in found:
        assert (first, second) == (3, 2)
        assert any("passing over step 3" in text and "checksum" in text for text in told)


def test_a_node_that_is_missing_is_named_by_all_ranks_and_tools(site: Site, nodes: Sequence[Node]) -> None:
    values(launch(WORLD, _save_replicated, site.run, site.volume, 2, nodes=nodes))
    for found in values(launch(2, _refused, site.run, site.volume, nodes=nodes[:1])):
        for kind, text in found:
            assert kind == "IncompleteCheckpoint"
            assert f"volume {site.volume} of host node-b" in text
        assert "the ranks run on node-a" in found[0][1]
        assert "none of" not in found[0][1]  # it may be whole: no older one takes its place
        assert "restore with a rank on node-b" in found[1][1]
    # Here, neither of the two disks is seen.
    verified = CliRunner().invoke(app, ["verify", str(site.run)])
    assert verified.exit_code == 1
    said = " ".join(verified.output.split())
    assert "of host node-a" in said
    assert "of host node-b" in said
    with pytest.raises(everystep.errors.IncompleteCheckpoint, match="of host node-"):
        everystep.load(site.run)


def _training(layout: str) -> dict[str, Any]:
    """A model with AdamW that has made two steps: every rank holds the scalars ``step``."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    if layout == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(torch.full((4, 256), 0.25 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _whole(state: dict[str, Any]) -> list[bytes]:
    """All tensors of a training, whole, to be compared on every rank."""
    tensors = [*state["model"].state_dict().values()]
    for moments in state["optimizer"].state_dict()["state"].values():
        tensors += [moments[name] for name in ("step", "exp_avg", "exp_avg_sq")]
    return [
        (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().numpy().tobytes()
        for tensor in tensors
    ]


def _save_training(run: Path, volume: Path, layout: str) -> list[bytes]:
    state = _training(layout)
    with _checkpointer(run, state, volume) as checkpointer:
        checkpointer.save(2)
    return _whole(state)


def _restore_training(run: Path, volume: Path) -> dict[str, list[bytes]]:
    """What is restored, as the same layout and as another."""
    import torch

    found = {}
    for layout in ("fsdp2", "ddp"):
        state = _training(layout)
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.zero_()
            for moments in state["optimizer"].state.values():
                for tensor in moments.values():
                    tensor.zero_()
        with _checkpointer(run, state, volume) as checkpointer:
            assert checkpointer.restore() == 2
        found[layout] = _whole(state)
    return found


def test_a_sharded_training_is_restored_in_any_layout_on_the_same_nodes(
    site: Site, nodes: Sequence[Node]
) -> None:
    saved = values(launch(WORLD, _save_training, site.run, site.volume, "fsdp2", nodes=nodes))
    for found in values(launch(WORLD, _restore_training, site.run, site.volume, nodes=nodes)):
        assert found == {"fsdp2": saved[0], "ddp": saved[0]}
