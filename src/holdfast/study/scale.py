"""How planning grows: real planner and manifest code on thousands of ranks that do not exist. No I/O.

For each layout and world it takes the time of what one rank does once per layout (merge everybody's view,
plan, its own fragments), once per save (its part), what the coordinator does per commit (decode and compare
everybody's message, encode the root), and what one rank does to resume on three quarters of the ranks (decode
root and layout, find the parts it needs, plan its reads). Work for one rank is measured on a few of them and
on a plan of their own, as it would be in as many processes.

Seconds are those of the CPU: all of it is computing, and others on the machine shall not count.

``python -m holdfast.study.scale`` prints the table, and growth against linear.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from rich.console import Console

from holdfast.format.checksums import DEFAULT_CHUNK_NBYTES, HEX_DIGITS, chunk_count
from holdfast.format.dtypes import carrier
from holdfast.format.manifest import (
    ALIGNMENT,
    Fragment,
    Leaf,
    Part,
    Root,
    ShardFile,
    decode_root,
    encode_part,
    encode_root,
    part_name,
    part_ref,
    shard_name,
)
from holdfast.format.shard import HeaderEntry, build_header, entry_name
from holdfast.plan.description import decode_plan, encode_plan, fingerprint
from holdfast.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from holdfast.plan.ranks import WritePlan
from holdfast.plan.read_sharing import SharePlan
from holdfast.plan.resharding import StoredIndex, Wanted, plan_reads
from holdfast.plan.topology import Topology
from holdfast.plan.world import Seen, View, merge_views
from holdfast.store.commit.messages import Call, Calls, Conversation, Done
from holdfast.store.ranks.checks.values import check_values, values_digest
from holdfast.store.ranks.checks.views import decode_view, encode_view
from holdfast.study.scale_report import (
    COMMIT_LIMIT_SECONDS,
    COMMIT_LIMIT_WORLD,
    LAYOUTS,
    Case,
    Layout,
    show,
)

WORLDS = (256, 1024, 4096, 16384)
LEAVES = 2000
_RANKS_PER_NODE = 8
_WIDTH = 8192
_COPIES = 3  # the weight and Adam's two moments
_T = TypeVar("_T")


def model(count: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """The leaves of a transformer and its optimizer: as many layers as make about `count`."""
    layer: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("attention.norm.weight", (_WIDTH,)),
        ("attention.query.weight", (_WIDTH, _WIDTH)),
        ("attention.key.weight", (_WIDTH // 4, _WIDTH)),
        ("attention.value.weight", (_WIDTH // 4, _WIDTH)),
        ("attention.out.weight", (_WIDTH, _WIDTH)),
        ("mlp.norm.weight", (_WIDTH,)),
        ("mlp.gate.weight", (28_672, _WIDTH)),
        ("mlp.up.weight", (28_672, _WIDTH)),
        ("mlp.down.weight", (_WIDTH, 28_672)),
    )
    names: list[tuple[str, tuple[int, ...]]] = [
        ("embed.weight", (128_256, _WIDTH)),
        ("norm.weight", (_WIDTH,)),
    ]
    while (len(names) + len(layer)) * _COPIES <= count:
        number = (len(names) - 2) // len(layer)
        names += [(f"layers.{number}.{name}", shape) for name, shape in layer]
    prefixes = (("model.", "BF16"), ("optimizer.exp_avg.", "F32"), ("optimizer.exp_avg_sq.", "F32"))
    return [(prefix + name, dtype, shape) for prefix, dtype in prefixes for name, shape in names]


def describe(layout: Layout, world: int, count: int) -> list[LeafLayout]:
    """The world's leaves as the planner takes them."""
    return merge_views({look(layout, world, count): range(world)})


def look(layout: Layout, world: int, count: int) -> View:
    """The leaves as a rank sees them, the same on all ranks: plain copies, or how they lie on a mesh."""
    tensor = math.gcd(world, _RANKS_PER_NODE) if layout == "hsdp x tp" else 1
    copies = {"ddp": world, "fsdp": 1, "hsdp x tp": math.gcd(world // tensor, 4)}[layout]
    mesh = Mesh.grid(copies, world // copies // tensor, tensor)
    placements = {
        None: None if layout == "ddp" else MeshPlacement(mesh, (Split(0, 1),)),
        # Fully sharded on top of tensor parallel: the latter comes first.
        0: MeshPlacement(mesh, (Split(0, 2), Split(0, 1))),
        1: MeshPlacement(mesh, (Split(0, 1), Split(1, 2))),
    }
    found: list[Seen] = []
    for name, dtype, shape in model(count):
        axis = None if tensor == 1 or len(shape) == 1 else int(".out." in name or ".down." in name)
        found.append(Seen(name, dtype, shape, placements[axis]))
    return tuple(found)


def simulate(layout: Layout, world: int, count: int = LEAVES, samples: int = 4) -> Case:
    """One layout in one world."""
    try:
        return _simulate(layout, world, count, samples)
    finally:
        gc.unfreeze()


def _simulate(layout: Layout, world: int, count: int, samples: int) -> Case:
    topology = Topology.regular(world, _RANKS_PER_NODE, sockets_per_node=2)
    plan = WritePlan(describe(layout, world, count), topology)
    view = look(layout, world, count)
    merge_seconds: list[float] = []
    plan_seconds: list[float] = []
    fragment_seconds: list[float] = []
    part_seconds: list[float] = []
    parts: list[tuple[Part, bytearray]] = []
    for rank in _sample(world, samples):
        seconds, leaves = _timed(lambda: merge_views({decode_view(encode_view(view)): range(world)}))
        merge_seconds.append(seconds)
        seconds, own = _timed(partial(WritePlan, leaves, topology))
        plan_seconds.append(seconds)
        fragment_seconds.append(_timed(partial(own.fragments, rank))[0])
        part = _part(own, rank)
        seconds, encoded = _timed(partial(encode_part, part))
        part_seconds.append(seconds)
        parts.append((part, encoded))
    commit_seconds, message_nbytes, root = _commit(world, parts, plan)
    smaller = max(1, world * 3 // 4)
    resharded = [_reshard(root, layout, count, smaller, rank) for rank in _sample(smaller, samples)]
    loads = plan.loads
    written = max(
        sum(fragment.nbytes for leaf in part.leaves for fragment in leaf.fragments) for part, _ in parts
    )
    return Case(
        layout=layout,
        world=world,
        leaves=len(plan.leaves),
        state_nbytes=int(loads.sum()),
        merge_seconds=statistics.median(merge_seconds),
        plan_seconds=statistics.median(plan_seconds),
        fragments_seconds=statistics.median(fragment_seconds),
        load_ratio=max(int(loads.max()), written) / float(loads.mean()),
        fragments=statistics.mean(sum(len(leaf.fragments) for leaf in part.leaves) for part, _ in parts),
        description_nbytes=len(encode_plan(plan)),
        part_nbytes=statistics.mean(len(encoded) for _, encoded in parts),
        part_seconds=statistics.median(part_seconds),
        message_nbytes=message_nbytes,
        root_nbytes=len(root),
        commit_seconds=commit_seconds,
        reshard_world=smaller,
        reshard_parts=statistics.mean(found.parts for found in resharded),
        reshard_reads=statistics.mean(found.reads for found in resharded),
        reshard_open_seconds=statistics.median(found.open_seconds for found in resharded),
        reshard_locate_seconds=statistics.median(found.locate_seconds for found in resharded),
        reshard_seconds=statistics.median(found.plan_seconds for found in resharded),
    )


def run(
    worlds: Sequence[int] = WORLDS,
    count: int = LEAVES,
    layouts: Sequence[Layout] = LAYOUTS,
    samples: int = 4,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Case]:
    """Every layout in every world, and half the leaves in the last but one world, for growth with leaves."""
    cases: list[Case] = []
    simulate(layouts[0], min(worlds), 6, 1)  # what first calls set up is not counted
    for layout in layouts:
        for world, leaves in [*((world, count) for world in worlds), (worlds[-2:][0], count // 2)]:
            progress(f"{layout}: {world:,} ranks, about {leaves:,} leaves")
            cases.append(simulate(layout, world, leaves, samples))
    return cases


def _sample(world: int, samples: int) -> list[int]:
    """Ranks spread over the world, first and last among them."""
    return sorted({round(at) for at in np.linspace(0, world - 1, samples)})


def _timed(work: Callable[[], _T]) -> tuple[float, _T]:
    # A rank's own collector would not go through what this process holds of the others.
    gc.collect()
    gc.freeze()
    start = time.thread_time()
    result = work()
    return time.thread_time() - start, result


def _part(plan: WritePlan, rank: int) -> Part:
    """The part of a rank that wrote its fragments to one volume: all in it has its real size."""
    entries: list[HeaderEntry] = []
    spots: list[tuple[int, int]] = []  # leaf, begin
    seen: dict[int, int] = {}
    fragments = plan.fragments(rank)
    at = 0
    for item in fragments:
        leaf = plan.leaves[item.leaf]
        index = seen[item.leaf] = seen.get(item.leaf, -1) + 1
        stored = carrier(leaf.dtype)
        shape = (*item.piece.box.shape, *stored.tail)
        entries.append(HeaderEntry(entry_name(leaf.name, index), stored.name, shape, at, at + item.nbytes))
        spots.append((item.leaf, at))
        at += item.nbytes
    header = build_header(entries, {"format": "pt"})
    held: dict[int, list[Fragment]] = {}
    for item, (number, begin) in zip(fragments, spots, strict=True):
        digits = HEX_DIGITS * chunk_count(item.nbytes, DEFAULT_CHUNK_NBYTES)
        box = item.piece.box
        held.setdefault(number, []).append(
            Fragment(box.start, box.shape, 0, len(header) + begin, item.nbytes, "5" * digits)
        )
    size = -(-(len(header) + at) // ALIGNMENT) * ALIGNMENT
    file = ShardFile(shard_name(rank, 0), size, len(header), "5" * HEX_DIGITS)
    leaves = tuple(
        Leaf(plan.leaves[n].name, plan.leaves[n].dtype, plan.leaves[n].shape, "torch", tuple(found))
        for n, found in held.items()
    )
    return Part(rank, DEFAULT_CHUNK_NBYTES, (file,), leaves, ())


def _commit(
    world: int, parts: Sequence[tuple[Part, bytearray]], plan: WritePlan
) -> tuple[float, float, bytearray]:
    """What the coordinator does once everybody's message is there: seconds, bytes of a message, the root."""
    first, encoded = parts[0]
    layout, plan_digest = encode_plan(plan), fingerprint(plan)
    tree = _tree(plan)
    values = values_digest(tree)
    letters: dict[str, bytes] = {}
    for rank in range(1, world):
        ref = msgspec.structs.replace(part_ref(first, encoded), rank=rank, file=part_name(rank))
        files = (part_name(rank), shard_name(rank, 0))
        done = Done(ref, files, 1 << 30, 1 << 30, plan_digest, tree=False, values=values)
        letters[f"0/done/{rank}"] = msgspec.json.encode(done)
    talk = _conversation(world, letters)

    def commit() -> bytearray:
        dones = talk.collect()
        if any(done.plan != plan_digest for done in dones):
            raise AssertionError("a rank wrote by another plan")
        check_values({0: values, **{done.ref.rank: done.values for done in dones}}, {}, [0] * world)
        return encode_root(
            Root(
                id="5" * 32,
                step=1000,
                created=0.0,
                world=world,
                tree=tree,
                part=first,
                parts=tuple(done.ref for done in dones),
                trees=tuple(done.ref.rank for done in dones if done.tree),
                layout=layout,
            )
        )

    seconds, root = min((_timed(commit) for _ in range(3)), key=lambda found: found[0])
    if len(decode_root(root, "the simulation").parts) != world - 1:
        raise AssertionError("the root does not name everybody's part")
    return seconds, statistics.mean(map(len, letters.values())) if letters else 0.0, root


def _conversation(world: int, letters: Mapping[str, bytes]) -> Conversation:
    """The coordinator's end of a call in which everybody has said what there is to say."""

    def collect(keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        return {key: letters[key] for key in keys}

    team = SimpleNamespace(world=world, is_coordinator=True, mail=SimpleNamespace(collect=collect))
    return Conversation(Calls(cast("Any", team), 1.0), 0, Call("save", 1000))


def _tree(plan: WritePlan) -> dict[str, Any]:
    """The state's tree: containers by the first word of a leaf's name, and some plain values."""
    tree: dict[str, Any] = {"step": 1000, "scheduler": {"last_epoch": 1000, "base_lrs": [3e-4]}}
    for leaf in plan.leaves:
        group, _, name = leaf.name.partition(".")
        tree.setdefault(group, {})[name] = {"$leaf": leaf.name}
    return tree


@dataclass(frozen=True, slots=True)
class _Resharded:
    """What one rank of another world does to resume, and how long each step of that takes."""

    parts: int
    reads: int
    open_seconds: float
    locate_seconds: float
    plan_seconds: float


def _reshard(root: bytearray, layout: Layout, count: int, world: int, rank: int) -> _Resharded:
    wanted_layout = describe(layout, world, count)
    share = SharePlan(wanted_layout, Topology.regular(world, _RANKS_PER_NODE))
    opening, own = _timed(lambda: decode_plan(decode_root(root, "the root").layout, "the root"))

    def locate() -> tuple[list[Wanted], set[int]]:
        wanted = [Wanted(wanted_layout[item.leaf].name, item.piece) for item in share.reads(rank)]
        return wanted, {source for want in wanted for source, _ in own.sources(want.leaf, want.piece.box)}

    locating, (wanted, needed) = _timed(locate)
    parts = [_part(own, source) for source in sorted(needed)]
    planning, found = _timed(lambda: plan_reads(StoredIndex(parts), wanted))
    if found.missing:
        raise AssertionError(
            f"{len(found.missing)} boxes are missing, the first of {found.missing[0].leaf!r}"
        )
    return _Resharded(len(parts), len(found.reads), opening, locating, planning)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the coordinator stays below its limit, 1 when not, 2 for usage."""
    parser = argparse.ArgumentParser(prog="holdfast.study.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(WORLDS))
    parser.add_argument("--leaves", type=int, default=LEAVES)
    parser.add_argument("--layout", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--samples", type=int, default=4, help="ranks measured in each world")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    given = parser.parse_args(arguments)
    if min(given.ranks) < 1 or given.leaves < 6 or given.samples < 1:
        parser.error("at least 1 rank, 6 leaves and 1 sample")
    status = Console(stderr=True)
    cases = run(
        given.ranks, given.leaves, given.layout, given.samples, lambda text: status.print(text, style="dim")
    )
    if given.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(cases), indent=2).decode() + "\n")
    else:
        show(cases, Console(width=200) if not sys.stdout.isatty() else Console())
    slow = [c for c in cases if c.world <= COMMIT_LIMIT_WORLD and c.commit_seconds >= COMMIT_LIMIT_SECONDS]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
