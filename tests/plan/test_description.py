"""A plan as bytes: what comes back plans the same, and what no planner wrote is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from everystep.errors import CorruptCheckpoint
from everystep.plan.description import decode_plan, encode_plan, fingerprint
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from plan.test_ranks import plans
from support.worlds.named_layouts import NAMED


@settings(deadline=None)
@given(plans())
def test_a_decoded_plan_is_the_same_plan(plan: WritePlan) -> None:
    data = encode_plan(plan)
    again = decode_plan(data, "here")
    assert again.leaves == plan.leaves
    assert again.topology == plan.topology
    assert [again.fragments(rank) for rank in range(plan.topology.world)] == [
        plan.fragments(rank) for rank in range(plan.topology.world)
    ]
    assert encode_plan(again) == data


def test_any_change_of_the_writers_changes_the_fingerprint() -> None:
    topology = Topology.regular(8, 4)
    found = {
        fingerprint(plan)
        for plan in (
            *(WritePlan(NAMED[name](8), topology) for name in NAMED),
            WritePlan(NAMED["ddp"](8), topology, writers="node"),
            WritePlan(NAMED["ddp"](8), topology, writers=2),
            WritePlan(NAMED["ddp"](8), topology, block_nbytes=512),
            WritePlan(NAMED["ddp"](8), Topology.regular(8, 2)),
            WritePlan(NAMED["ddp"](8)[::-1], topology),
        )
    }
    assert len(found) == len(NAMED) + 5
    assert fingerprint(WritePlan(NAMED["ddp"](8), topology)) in found


def test_a_regular_world_of_thousands_is_described_by_its_names() -> None:
    spread = MeshPlacement(Mesh.grid(2048, 8), (Split(0, 0, factor=8), Split(0, 1)))
    leaves = [LeafLayout(f"layers.{n}.weight", "F32", (8192, 8192), (spread,)) for n in range(1000)]
    plan = WritePlan(leaves, Topology.regular(16_384))
    assert len(encode_plan(plan)) < 60 * len(leaves)


def _set(path: list[Any], value: Any) -> bytes:
    record = json.loads(encode_plan(WritePlan(NAMED["fsdp"](4), Topology.regular(4))))
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        _set(["format"], "everystep-layout/9"),
        _set(["extra"], 1),
        _set(["writers"], "nobody"),
        _set(["writers"], 0),
        _set(["block_nbytes"], 0),
        _set(["nodes"], [[0, 100_000], [1, 100_000]]),
        _set(["nodes"], [[0, 5]]),
        _set(["nodes"], []),
        _set(["meshes", 0, "shape"], [100_000, 100_000]),
        _set(["meshes", 0, "shape"], [100_000] * 60),
        _set(["meshes", 0, "shape"], [4, 4]),
        _set(["meshes", 0, "first"], 1),
        _set(["meshes", 0, "strides"], [0]),
        _set(["meshes", 0, "table"], [0, 1, 1, 2]),
        _set(["spreads", 0, "mesh"], 7),
        _set(["spreads", 0, "splits"], [[0, 3, 1]]),
        _set(["spreads", 0, "splits"], [[9, 0, 1]]),
        _set(["spreads", 0, "splits"], [[0, 0, 1 << 40]]),
        _set(["spreads", 0, "box"], [[0, 0], [1, 1]]),
        _set(["leaves", 0, 1], "F33"),
        _set(["leaves", 0, 3], [99]),
        _set(["leaves", 0, 3], []),
        _set(["leaves", 0, 0], "norm.weight"),
    ],
)
def test_a_description_that_no_planner_wrote_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="not a layout"):
        decode_plan(data, "here")
