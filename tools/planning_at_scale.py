"""How planning grows, with the real planner and manifests, on simulated ranks.

    python tools/planning_at_scale.py                 up to 16,384 ranks
    python tools/planning_at_scale.py --quick         up to 1,024
    python tools/planning_at_scale.py --ranks 64,128 --check --json

For each layout and world it takes the time of what one rank does once per layout (merge all views, plan, its
own fragments), once per save (its part), what the coordinator does per commit (decode and compare all
messages, encode the root), and what one rank does to resume on three quarters of the ranks (decode root and
layout, find the parts it needs, plan its reads). Each round measures another rank of the world. No I/O.

Seconds are those of the CPU: all of it is computing, and others on the machine shall not count.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec
import numpy as np
from rich.console import Console

from everystep.engine import CHUNK_NBYTES
from everystep.format.checksums import HEX_DIGITS, chunk_count
from everystep.format.dtypes import carrier
from everystep.format.manifest import (
    ALIGNMENT,
    Fragment,
    Leaf,
    Part,
    PartRef,
    Root,
    ShardFile,
    decode_root,
    encode_part,
    encode_root,
    part_name,
    part_ref,
    shard_name,
)
from everystep.format.shard import HeaderEntry, build_header, entry_name
from everystep.plan.description import decode_plan, encode_plan, fingerprint
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.read_sharing import SharePlan
from everystep.plan.resharding import StoredIndex, Wanted, plan_reads
from everystep.plan.topology import Topology
from everystep.plan.world import Seen, View, merge_views
from everystep.store.commit.round import ShareWritten
from everystep.store.ranks.checks.values import check_values, values_digest
from everystep.store.ranks.checks.views import decode_view, encode_view
from everystep.store.ranks.meeting import Meeting
from everystep.store.ranks.save_round import SaveRound
from everystep_study.harness import results, runner
from everystep_study.harness.results import SECONDS, Bar, Result, Row
from everystep_study.harness.suite import Case, Group, Needs, Suite, Turn
from everystep_study.report import elements as report
from everystep_study.report import pages, writers
from everystep_study.report.elements import Columns, Shown, milliseconds

Layout = Literal["ddp", "fsdp", "hsdp x tp"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LEAVES = 2000
COMMIT_LIMIT_SECONDS = 1.0
"""What the coordinator may take per commit of `COMMIT_LIMIT_WORLD` ranks."""
COMMIT_LIMIT_WORLD = 1024

_RANKS_PER_NODE = 8
_WIDTH = 8192
_COPIES = 3  # the weight and Adam's two moments
_T = TypeVar("_T")

_PER_RANK = ("merge_seconds", "plan_seconds", "fragments_seconds")
_PER_RESUME = ("open_seconds", "locate_seconds", "reads_seconds")


class PlanAtScale(Case):
    """One layout in one world; every round is another rank's work."""

    sections = ("plan",)

    def __init__(self, layout: Layout, world: int, count: int, ranks: int) -> None:
        self.title, self.key = layout, f"{world} x {count}"
        self._layout, self._world, self._count = layout, world, count
        self._ranks, self._smaller = _spread_out(world, ranks), max(1, world * 3 // 4)
        self._readers = _spread_out(self._smaller, ranks)

    def setup(self, directory: Path) -> None:
        self._topology = Topology.regular(self._world, _RANKS_PER_NODE, sockets_per_node=2)
        self._view = look(self._layout, self._world, self._count)
        self._plan = WritePlan(describe(self._layout, self._world, self._count), self._topology)
        part = _part(self._plan, 0)
        self._coordinator = _Coordinator(self._world, part, encode_part(part), self._plan)

    def measure(self, turn: Turn) -> None:
        rank = self._ranks[(turn.round - 1) % len(self._ranks)]
        view, world = self._view, self._world
        merging, leaves = _timed(lambda: merge_views({decode_view(encode_view(view)): range(world)}))
        planning, own = _timed(partial(WritePlan, leaves, self._topology))
        cutting, _ = _timed(partial(own.fragments, rank))
        part = _part(own, rank)
        encoding, encoded = _timed(partial(encode_part, part))
        committing, root = _timed(self._coordinator.commit)
        if len(decode_root(root, "the simulation").parts) != world - 1:
            raise AssertionError("the root does not name the part of every rank")
        fragments = [fragment for leaf in part.leaves for fragment in leaf.fragments]
        written, loads = sum(fragment.nbytes for fragment in fragments), self._plan.loads
        reader = self._readers[(turn.round - 1) % len(self._readers)]
        readings = {
            "merge_seconds": merging,
            "plan_seconds": planning,
            "fragments_seconds": cutting,
            "part_seconds": encoding,
            "part_nbytes": len(encoded),
            "fragments": len(fragments),
            "commit_seconds": committing,
            "message_nbytes": self._coordinator.message_nbytes,
            "root_nbytes": len(root),
            "description_nbytes": len(encode_plan(self._plan)),
            "load_ratio": max(int(loads.max()), written) / float(loads.mean()),
            "state_nbytes": int(loads.sum()),
            "world": world,
            "leaves": len(self._plan.leaves),
            "reshard_world": self._smaller,
            **_reshard(root, self._layout, self._count, self._smaller, reader),
        }
        readings["rank_seconds"] = sum(readings[name] for name in _PER_RANK)
        readings["resume_seconds"] = sum(readings[name] for name in _PER_RESUME)
        readings[SECONDS] = readings["rank_seconds"]
        turn.record("plan", readings)

    def close(self) -> None:
        gc.unfreeze()


@dataclass
class ScaleSuite(Suite):
    """`rounds` ranks of every world are measured."""

    name = "planning at scale"
    worlds: tuple[int, ...] = (256, 1024, 4096, 16384)
    leaves: int = LEAVES
    layouts: tuple[Layout, ...] = LAYOUTS
    rounds: int = 4

    def needs(self) -> Needs:
        if not self.worlds or min(self.worlds) < 1 or self.leaves < 6:
            raise ValueError("a simulation has at least 1 rank and 6 leaves")
        return Needs()

    def groups(self, folder: Path) -> Iterator[Group]:
        """Every layout in every world; half the leaves in the last but one world, for growth with leaves."""
        for layout in self.layouts:
            sizes = [
                *((world, self.leaves) for world in self.worlds),
                (self.worlds[-2:][0], self.leaves // 2),
            ]
            for world, leaves in sizes:
                case = PlanAtScale(layout, world, leaves, self.rounds)
                yield Group(f"{layout}, {world:,} ranks", [case], self.rounds, warm_up=0, settle=False)

    def subject(self) -> str:
        return f"worlds of up to {max(self.worlds):,} simulated ranks, real planner and manifests"

    def views(self, result: Result) -> list[report.View]:
        def count(name: str) -> Callable[[Row], Shown]:
            return lambda row: f"{row.median(name):,.0f}"

        def kib(name: str) -> Callable[[Row], Shown]:
            return lambda row: f"{row.median(name, 1 / 1024):,.0f}"

        def ms(name: str) -> Callable[[Row], Shown]:
            return lambda row: milliseconds(row.median(name))

        planning: Columns = {
            "leaves": count("leaves"),
            "max/mean": lambda row: f"{row.peak('load_ratio'):.4f}",
            "described": kib("description_nbytes"),
            "part": kib("part_nbytes"),
            "encode": ms("part_seconds"),
            "message B": count("message_nbytes"),
            "root": kib("root_nbytes"),
            "commit": ms("commit_seconds"),
        }
        resuming: Columns = {
            "on": count("reshard_world"),
            "parts": count("parts"),
            "reads": count("reads"),
            "open": ms("open_seconds"),
            "locate": ms("locate_seconds"),
            "plan reads": ms("reads_seconds"),
        }
        resume = partial(Row.spread, name="resume_seconds")
        return [
            report.View(
                "plan",
                "planning and committing (ms, KiB)",
                "plan/rank",
                columns=planning,
                show=milliseconds,
                named_by=_group,
            ),
            report.View(
                "plan",
                "resuming on fewer ranks (ms)",
                "resume/rank",
                resume,
                columns=resuming,
                show=milliseconds,
                named_by=_group,
            ),
        ]

    def notes(self, result: Result) -> list[str]:
        return [
            "Times are CPU time, medians of a few ranks. 'plan/rank': merge all views, plan, own fragments. "
            "'max/mean' is above 1 where a layout leaves uneven shards that have no copies to share."
        ]

    def bars(self, result: Result) -> list[Bar]:
        found = []
        for row in result.section("plan"):
            if row.median("world") == COMMIT_LIMIT_WORLD:
                promise = f"{row.group}: the coordinator's work per commit"
                measured = results.interval(row, "commit_seconds")
                found.append(results.judge("commit", promise, "<=", COMMIT_LIMIT_SECONDS, "s", measured))
        return found


def _group(row: Row) -> str:
    return row.group


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
    spreads = {
        None: None if layout == "ddp" else MeshPlacement(mesh, (Split(0, 1),)),
        # Fully sharded on top of tensor parallel: the latter comes first.
        0: MeshPlacement(mesh, (Split(0, 2), Split(0, 1))),
        1: MeshPlacement(mesh, (Split(0, 1), Split(1, 2))),
    }
    found: list[Seen] = []
    for name, dtype, shape in model(count):
        axis = None if tensor == 1 or len(shape) == 1 else int(".out." in name or ".down." in name)
        found.append(Seen(name, dtype, shape, spreads[axis]))
    return tuple(found)


def _spread_out(world: int, samples: int) -> list[int]:
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
    for item, (index, begin) in zip(fragments, spots, strict=True):
        digits = HEX_DIGITS * chunk_count(item.nbytes, CHUNK_NBYTES)
        box = item.piece.box
        held.setdefault(index, []).append(
            Fragment(box.start, box.shape, 0, len(header) + begin, item.nbytes, "5" * digits)
        )
    size = -(-(len(header) + at) // ALIGNMENT) * ALIGNMENT
    file = ShardFile(shard_name(rank, 0), size, len(header), "5" * HEX_DIGITS)
    leaves = tuple(
        Leaf(plan.leaves[n].name, plan.leaves[n].dtype, plan.leaves[n].shape, "torch", tuple(found))
        for n, found in held.items()
    )
    return Part(rank, CHUNK_NBYTES, (file,), leaves, ())


class _Coordinator:
    """What the coordinator does once the message of every rank is there."""

    def __init__(self, world: int, first: Part, encoded: bytearray, plan: WritePlan) -> None:
        self._world, self._first = world, first
        self._layout, self._digest = encode_plan(plan), fingerprint(plan)
        self._tree = _tree(plan)
        self._values = values_digest(self._tree)
        letters: dict[int, bytes] = {}
        for rank in range(1, world):
            ref = msgspec.structs.replace(part_ref(first, encoded), rank=rank, file=part_name(rank))
            files = (part_name(rank), shard_name(rank, 0))
            done = ShareWritten(ref, files, 1 << 30, 1 << 30, self._digest, tree=False, values=self._values)
            letters[rank] = msgspec.msgpack.encode({"data": msgspec.msgpack.encode(done)})
        self.message_nbytes = sum(map(len, letters.values())) / max(1, len(letters))
        self._own = ShareWritten(
            PartRef(0, "", 0, ""), (), 1 << 30, 1 << 30, self._digest, False, self._values
        )
        self._save_round = _save_round(world, letters)

    def commit(self) -> bytearray:
        dones = self._save_round.collect(self._own)[1:]
        if any(done.plan != self._digest for done in dones):
            raise AssertionError("a rank wrote by another plan")
        values = {0: self._values, **{done.ref.rank: done.values for done in dones}}
        check_values(values, {}, [0] * self._world)
        return encode_root(
            Root(
                id="5" * 32,
                step=1000,
                created=0.0,
                world=self._world,
                tree=self._tree,
                part=self._first,
                parts=tuple(done.ref for done in dones),
                trees=tuple(done.ref.rank for done in dones if done.tree),
                layout=self._layout,
            )
        )


def _save_round(world: int, letters: Mapping[int, bytes]) -> SaveRound:
    """The coordinator's end of a save in which all ranks have written their shares."""

    def collect(keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        return {key: letters[int(key.rpartition("/")[2])] for key in keys}

    messages: Any = SimpleNamespace(collect=collect, under=lambda path: messages)
    transport = SimpleNamespace(rank=0, world=world, is_coordinator=True, messages=messages)
    return SaveRound(Meeting(cast("Any", transport), "save", 1.0, "0"))


def _tree(plan: WritePlan) -> dict[str, Any]:
    """The state's tree: containers by the first word of a leaf's name, and some plain values."""
    tree: dict[str, Any] = {"step": 1000, "scheduler": {"last_epoch": 1000, "base_lrs": [3e-4]}}
    for leaf in plan.leaves:
        group, _, name = leaf.name.partition(".")
        tree.setdefault(group, {})[name] = {"$leaf": leaf.name}
    return tree


def _reshard(root: bytearray, layout: Layout, count: int, world: int, rank: int) -> dict[str, float]:
    """What one rank of another world does to resume, as readings."""
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
    return {
        "parts": len(parts),
        "reads": len(found.reads),
        "open_seconds": opening,
        "locate_seconds": locating,
        "reads_seconds": planning,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="How planning grows with the number of ranks. No I/O.")
    parser.add_argument("--ranks", metavar="N,N,...", help="sizes of the simulated worlds")
    parser.add_argument("--leaves", type=int, help=f"of the model and its optimizer; default: {LEAVES}")
    parser.add_argument("--rounds", type=int, help="ranks of each world that are measured")
    parser.add_argument("--quick", action="store_true", help="small worlds and few rounds")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a commit takes too long")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    suite = ScaleSuite(worlds=(256, 1024), rounds=3) if options.quick else ScaleSuite()
    if options.ranks:
        suite.worlds = tuple(sorted({int(word) for word in options.ranks.split(",")}))
    suite.leaves = options.leaves or suite.leaves
    suite.rounds = options.rounds or suite.rounds
    with tempfile.TemporaryDirectory() as folder:
        found = runner.run(suite, Path(folder), Console(stderr=True), check=options.check)
    if options.json:
        print(results.to_json(found).decode(), end="")
    else:
        console = Console()
        console.print(
            pages.heading(found),
            *map(writers.terminal, pages.tables(suite, found)),
            *pages.notes(suite, found),
            sep="\n",
        )
    return int(pages.has_problem(suite, found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
