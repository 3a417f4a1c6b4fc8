"""Runs to be shown on a page: a small real one, and long logs and wide states that come from no training."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import everystep
from everystep.checkpointer.events import (
    Event,
    EventLog,
    Failed,
    Opened,
    PassedOver,
    Phases,
    Preempted,
    RemovedEarly,
    Restored,
    Saved,
    ShortOfSpace,
)
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from support.worlds.several_ranks import Own, write_several

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>&amp;\u2028\u202e"
"""A name that would be markup, in several ways, wherever it is not escaped."""
BEGAN = 1_790_000_000.0


def layered_state(layers: int, width: int = 8, seed: int = 0) -> dict[str, Any]:
    """Names and shapes as a transformer has them: ten leaves in a layer, with the moments of an optimizer."""
    random_numbers = np.random.default_rng(seed)

    def array(*shape: int) -> Any:
        return random_numbers.normal(0, 0.02, shape).astype(np.float32)

    blocks = {}
    for number in range(layers):
        blocks[str(number)] = {
            "attn": {"qkv": {"weight": array(3 * width, width), "bias": np.zeros(3 * width, np.float32)}},
            "mlp": {"up": {"weight": array(4 * width, width)}, "down": {"weight": array(width, 4 * width)}},
            "norm": {"weight": np.ones(width, np.float32)},
        }
    model = {"embed": {"weight": array(16 * width, width)}, "h": blocks}
    return {
        "model": model,
        "optimizer": {"h": _moments(blocks), "lr": 3e-4, "step": 0},
        "rng": {"seed": 17},
    }


def _moments(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, item in tree.items():
        found[name] = (
            _moments(item) if isinstance(item, dict) else {"exp_avg": item * 0.1, "exp_avg_sq": item * item}
        )
    return found


def train(run: Path, state: dict[str, Any], steps: range, *, keep: int = 3) -> None:
    """A training that changes later layers more."""
    with everystep.Checkpointer(run, state, mode="sync", keep=everystep.Keep(last=keep)) as ckpt:
        ckpt.restore()
        for step in steps:
            for number, block in state["model"]["h"].items():
                if number != "0":  # the first layer is frozen
                    block["mlp"]["up"]["weight"] *= 1 + 1e-4 * int(number)
            state["optimizer"]["step"] = step
            ckpt.save(
                step, metrics={"loss": 4 * math.exp(-step / 40) + 1, "accuracy": 1 - math.exp(-step / 60)}
            )


def long_story(saves: int, *, seed: int = 0, every: int = 50) -> Iterator[Event]:
    """The events of a training with its troubles: about as many as saves."""
    dice = random.Random(seed)
    time, step = BEGAN, 0
    yield _opened(time)
    for number in range(saves):
        time += dice.uniform(18, 24)
        step += every
        if number and number % 1500 == 0:
            yield Failed(step, time, "overlap", "StorageFull", f"no space left {HOSTILE}", 0.4)
            continue
        if number and number % 2300 == 0:
            yield Preempted(step, time, "SIGTERM")
            time += 5400
            yield _opened(time)
            yield PassedOver(step, time + 1, "r00000.v0.safetensors: chunk 17 does not match its checksum")
            step -= every
            yield Restored(step, time + 4, 8 << 30, 2.5)
            continue
        yield saved(step, time, dice)
    yield ShortOfSpace(step, time, 8 << 30, 20 << 30, 5, 2)
    yield RemovedEarly(step, time, (step - 2 * every,))


def saved(step: int, time: float, dice: random.Random, slow: float = 1.0) -> Saved:
    slow = slow * (12 if dice.random() < 0.002 else 1)
    write = slow * dice.uniform(1.9, 2.4)
    return Saved(
        step=step,
        time=time,
        mode="overlap",
        nbytes=8 << 30,
        stored_nbytes=(8 << 30) + 4096,
        leaves=1200,
        seconds=Phases(dice.uniform(0.04, 0.09), write, dice.uniform(0.3, 0.5), dice.uniform(0.02, 0.05)),
        stall_seconds=dice.uniform(0.05, 0.15) + (write - 2.5 if write > 2.5 else 0),
        in_place_nbytes=7 << 30,
        copied_nbytes=1 << 30,
    )


def write_log(run: Path, events: Iterator[Event] | list[Event]) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    log = EventLog(run)
    for event in events:
        log.add(event)
    log.close()
    return run


def _opened(time: float) -> Opened:
    return Opened(time=time, pid=4711, host="node-7", mode="overlap", every=50)


def save_by_ranks(path: Path, step: int, world: int = 4, volumes: tuple[Path, ...] = ()) -> Path:
    """A checkpoint of several ranks: a split weight, a replicated bias, and a seed of each rank."""
    grid = Mesh.grid(world)
    leaves = [
        LeafLayout("model.w", "F32", (64, 64 * world), (MeshPlacement(grid, (Split(1, 0),)),), "numpy"),
        LeafLayout("model.b", "F32", (4096,), (MeshPlacement(grid),), "numpy"),
    ]
    state = {
        "model.w": np.arange(64 * 64 * world, dtype=np.float32).reshape(64, -1) + step,
        "model.b": np.ones(4096, np.float32),
    }
    own = {
        rank: Own(local={"rng": {"$leaf": f"@{rank}.rng"}}, arrays={f"@{rank}.rng": np.arange(5) + rank})
        for rank in range(world)
    }
    tree = {"model": {"w": {"$leaf": "model.w"}, "b": {"$leaf": "model.b"}}, "rng": {"$per_rank": "rng"}}
    plan = WritePlan(leaves, Topology.regular(world), block_nbytes=64)
    write_several(path, plan, state, tree=tree, own=own, volumes=volumes, step=step)
    return path
