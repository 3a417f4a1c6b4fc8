"""The rules a manifest keeps, checked before anything in it is used.

Owns relations between fields (docs/format.md lists them); types and ranges of single fields are checked while
decoding. Everything here takes time near-linear in the size of the manifest, whatever a hostile one says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any, Final

from everystep.errors import CorruptCheckpoint
from everystep.format.checksums import HEX_DIGITS, chunk_count, is_hex
from everystep.format.dtypes import is_beyond_arrays, is_known, itemsize
from everystep.format.geometry import Box, TooTangled, disjoint
from everystep.format.records import EMBEDDED, Fragment, Leaf, Part, Root, ShardFile

MIN_CHUNK_NBYTES: Final = 4096
MAX_CHUNK_NBYTES: Final = 1 << 30
MAX_EXACT_INT: Final = 2**53
"""Beyond this a JSON number may not survive other readers; larger integers are tagged strings."""
MAX_JSON_DEPTH: Final = 330
"""JSON brackets inside each other: 100 levels of state, up to three brackets each, and the manifest's own."""
MAX_PATH_NBYTES: Final = 4096
MAX_HOST_LENGTH: Final = 255

_NOT_HEX: Final = "checksums are not hexadecimal"

_OWN_NAME = re.compile(r"@(0|[1-9]\d{0,4})\.", re.ASCII)
_SHARD_NAME = re.compile(r"r(\d{5})\.v(?:0|[1-9]\d{0,4})\.safetensors", re.ASCII)


def validate_root(root: Root, where: str) -> None:
    """`CorruptCheckpoint` unless the root keeps every rule that can be checked without its other parts."""
    if not math.isfinite(root.created):
        raise CorruptCheckpoint("time of creation is not a number", path=where)
    if root.part.rank != 0:
        raise CorruptCheckpoint(f"the root embeds the part of rank {root.part.rank}, not of 0", path=where)
    previous = 0
    for ref in root.parts:
        if not previous < ref.rank < root.world:
            raise CorruptCheckpoint(
                f"part of rank {ref.rank} is repeated, out of order, or beyond the {root.world} ranks",
                path=where,
            )
        if ref.file != f"r{ref.rank:05d}.json":
            raise CorruptCheckpoint(
                f"part file name {ref.file[:80]!r} is not one Everystep writes", path=where
            )
        previous = ref.rank
    _check_trees(root, where)
    # With a layout, arrays without elements need not be in any part.
    alone = root.world == 1 and not root.layout
    names = _check_part(root.part, where, alone=alone)
    _check_tree(root.tree, where, names if alone else None)


def validate_part(part: Part, where: str) -> None:
    """`CorruptCheckpoint` unless the part keeps every rule that can be checked without the other parts."""
    _check_part(part, where, alone=False)
    _check_tree(part.tree, where, None)


def _check_trees(root: Root, where: str) -> None:
    """The root has a tree itself; others are in parts that there are, each mentioned once."""
    if root.part.tree is not None:
        raise CorruptCheckpoint("the root has a second tree in its part", path=where)
    there = {ref.rank for ref in root.parts}
    previous = 0
    for rank in root.trees:
        if rank <= previous or rank not in there:
            raise CorruptCheckpoint(
                f"the tree of rank {rank} is repeated, out of order, or of no part there is", path=where
            )
        previous = rank


def _check_part(part: Part, where: str, *, alone: bool) -> set[str]:
    """Returns the names of leaves and aliases. `alone`: there are no other parts."""
    chunk = part.chunk_nbytes
    if not MIN_CHUNK_NBYTES <= chunk <= MAX_CHUNK_NBYTES or chunk & (chunk - 1):
        raise CorruptCheckpoint(f"chunk size {chunk} is not a power of two in the allowed range", path=where)
    _check_files(part, where)
    names: set[str] = set()
    # Byte ranges taken in each file: sorted later, so that overlaps are found among neighbours.
    extents: list[list[tuple[int, int]]] = [[] for _ in part.files]
    plain = _PlainLeaves(part, extents)
    for leaf in part.leaves:
        if leaf.name in names:
            raise CorruptCheckpoint("leaf name appears twice", path=where, leaf=leaf.name[:1000])
        names.add(leaf.name)
        if alone and plain.accept(leaf):
            continue
        problem = None if alone else _owner_problem(leaf.name, part)
        if problem is None:
            must_cover = alone or is_own_name(leaf.name)
            problem = _leaf_problem(leaf, part, extents, must_cover=must_cover)
        if problem is not None:
            raise CorruptCheckpoint(problem, path=where, leaf=leaf.name[:1000])
    damaged = plain.not_hexadecimal()
    if damaged is not None:
        raise CorruptCheckpoint(_NOT_HEX, path=where, leaf=damaged.name[:1000])
    for file, ranges in zip(part.files, extents, strict=True):
        ranges.sort()
        end = 0
        for begin, stop in ranges:
            if begin < end:
                raise CorruptCheckpoint(f"fragments overlap at byte {begin} of {file.name}", path=where)
            end = stop
    targets = frozenset(names)
    for alias in part.aliases:
        if alias.name in names:
            raise CorruptCheckpoint("alias has a name that is taken", path=where, leaf=alias.name[:1000])
        own = not alone and (is_own_name(alias.name) or is_own_name(alias.of))
        problem = _owner_problem(alias.name, part) if own else None
        if problem is not None:
            raise CorruptCheckpoint(problem, path=where, leaf=alias.name[:1000])
        # What ranks share may be in any of their parts.
        if alias.of not in targets and (alone or own):
            raise CorruptCheckpoint(
                "alias of something that is not a leaf", path=where, leaf=alias.name[:1000]
            )
        names.add(alias.name)
    for tree in part.local.values():
        _check_tree(tree, where, names)
    return names


class _PlainLeaves:
    """The leaves that are stored in one piece, as nearly all are. Checks them as `_leaf_problem` does.

    A large state has few different types and shapes: what follows from these is computed once for each. All
    checksums are looked at together in the end.
    """

    def __init__(self, part: Part, extents: list[list[tuple[int, int]]]) -> None:
        self._chunk_nbytes = part.chunk_nbytes
        self._bounds = [(file.header_nbytes, file.nbytes) for file in part.files]
        self._extents = extents
        self._expected: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int, int]] = {}
        self._accepted: list[Leaf] = []

    def accept(self, leaf: Leaf) -> bool:
        """Whether a leaf is of this kind, and valid but for its checksums. Adds its bytes to the extents."""
        if len(leaf.fragments) != 1:
            return False
        fragment = leaf.fragments[0]
        start, nbytes, digits = self._expected.get((leaf.dtype, leaf.shape)) or self._expect(leaf)
        offset, number = fragment.offset, fragment.file
        if (
            fragment.shape != leaf.shape
            or fragment.start != start
            or fragment.nbytes != nbytes
            or len(fragment.chunks) != digits
            or number >= len(self._bounds)
        ):
            return False
        first, last = self._bounds[number]
        if offset < first or offset + nbytes > last:
            return False
        if nbytes:
            self._extents[number].append((offset, offset + nbytes))
        self._accepted.append(leaf)
        return True

    def _expect(self, leaf: Leaf) -> tuple[tuple[int, ...], int, int]:
        """The start, bytes and digits of checksums that the only fragment of such a leaf has."""
        nbytes = -1  # what none has
        if is_known(leaf.dtype) and not is_beyond_arrays(leaf.dtype, leaf.shape):
            nbytes = itemsize(leaf.dtype) * math.prod(leaf.shape)
        found = (0,) * len(leaf.shape), nbytes, HEX_DIGITS * chunk_count(nbytes, self._chunk_nbytes)
        self._expected[leaf.dtype, leaf.shape] = found
        return found

    def not_hexadecimal(self) -> Leaf | None:
        """The first accepted leaf whose checksums are not hexadecimal."""
        if is_hex("".join([leaf.fragments[0].chunks for leaf in self._accepted])):
            return None
        return next(leaf for leaf in self._accepted if not is_hex(leaf.fragments[0].chunks))


def is_own_name(name: str) -> bool:
    """Whether a name is one of rank-local leaves."""
    return _OWN_NAME.match(name) is not None


def _owner_problem(name: str, part: Part) -> str | None:
    match = _OWN_NAME.match(name)
    if match is not None and match[1] != str(part.rank):
        return f"rank {part.rank} has what belongs to rank {match[1]} alone"
    return None


def _check_files(part: Part, where: str) -> None:
    seen: set[str] = set()
    for file in part.files:
        match = _SHARD_NAME.fullmatch(file.name)
        # A rank names only files of its own, so two parts can never claim the same bytes.
        if match is None or int(match[1]) != part.rank:
            raise CorruptCheckpoint(
                f"shard name {file.name[:80]!r} is not one that rank {part.rank} writes", path=where
            )
        if file.name in seen:
            raise CorruptCheckpoint(f"shard {file.name} is listed twice", path=where)
        seen.add(file.name)
        problem = _volume_problem(file)
        if problem is not None:
            raise CorruptCheckpoint(f"shard {file.name}: {problem}", path=where)
        if not 8 <= file.header_nbytes <= file.nbytes:
            raise CorruptCheckpoint(
                f"shard {file.name} of {file.nbytes} bytes cannot have a header of {file.header_nbytes}",
                path=where,
            )


def _volume_problem(file: ShardFile) -> str | None:
    """A volume is a plain absolute path: what is opened is what an error message can name."""
    if file.host is not None and (len(file.host) > MAX_HOST_LENGTH or "\0" in file.host):
        return "its host has no name that a host can have"
    if file.volume is None:
        return None
    if len(file.volume.encode("utf-8", "surrogatepass")) > MAX_PATH_NBYTES or "\0" in file.volume:
        return "its volume has no path that a directory can have"
    first, *names = file.volume.split("/")
    if first or not names or any(name in ("", ".", "..") for name in names):
        return f"its volume {file.volume[:80]!r} is not a plain absolute path"
    if file.header_xxh3 == EMBEDDED:
        return "it holds the manifest, but lies elsewhere"
    return None


def _leaf_problem(
    leaf: Leaf, part: Part, extents: list[list[tuple[int, int]]], *, must_cover: bool
) -> str | None:
    """What is wrong with a leaf, or None; adds the bytes its fragments take to `extents`."""
    if not is_known(leaf.dtype):
        return f"unknown element type {leaf.dtype[:80]!r}"
    size = itemsize(leaf.dtype)
    shape = leaf.shape
    if is_beyond_arrays(leaf.dtype, shape):
        return f"shape {_brief(shape)} is beyond what any array can have"
    held = 0
    for fragment in leaf.fragments:
        problem = _fragment_problem(fragment, leaf, size, part)
        if problem is not None:
            return problem
        held += math.prod(fragment.shape)
        if fragment.nbytes:
            extents[fragment.file].append((fragment.offset, fragment.offset + fragment.nbytes))
    if must_cover and held != math.prod(shape):
        return f"fragments hold {held} elements, but the shape {_brief(shape)} has {math.prod(shape)}"
    if len(leaf.fragments) > 1:
        try:
            if not disjoint([Box(f.start, f.shape) for f in leaf.fragments]):
                return "two fragments hold the same elements"
        except TooTangled as error:
            return str(error)
    return None


def _fragment_problem(fragment: Fragment, leaf: Leaf, size: int, part: Part) -> str | None:
    start, shape, whole = fragment.start, fragment.shape, leaf.shape
    if len(start) != len(whole) or len(shape) != len(whole):
        return f"fragment has {len(shape)} dimensions at {len(start)}, the leaf {len(whole)}"
    # Most fragments are all of their leaf.
    if (shape != whole or any(start)) and any(
        s + n > limit for s, n, limit in zip(start, shape, whole, strict=True)
    ):
        return f"fragment at {_brief(start)} of shape {_brief(shape)} is outside of {_brief(whole)}"
    if fragment.nbytes != size * math.prod(shape):
        return f"{fragment.nbytes} bytes is not what {leaf.dtype} of shape {_brief(shape)} takes"
    if fragment.file >= len(part.files):
        return f"fragment in file number {fragment.file} of {len(part.files)}"
    file = part.files[fragment.file]
    if fragment.offset < file.header_nbytes or fragment.offset + fragment.nbytes > file.nbytes:
        return (
            f"fragment at byte {fragment.offset} of {fragment.nbytes} bytes is not in the data of {file.name}"
        )
    if len(fragment.chunks) != HEX_DIGITS * chunk_count(fragment.nbytes, part.chunk_nbytes):
        return f"{len(fragment.chunks)} digits of checksums do not fit {fragment.nbytes} bytes"
    if not is_hex(fragment.chunks):
        return _NOT_HEX
    return None


def _check_tree(tree: Any, where: str, names: Collection[str] | None) -> None:
    """Depth, numbers and (when all names are known) references; the rest of the grammar is `state`'s."""
    level: list[Any] = [tree]
    depth = 1  # the manifest's own object
    while level:
        depth += 1
        below: list[Any] = []
        referred = False
        for node in level:
            kind = type(node)
            if kind is dict:
                # Most nodes of a large state are references to leaves, and there is nothing below a name.
                if (
                    names is not None
                    and len(node) == 1
                    and type(name := node.get("$leaf")) is str
                    and name in names
                ):
                    referred = True
                    continue
                below.extend(node.values())
                if ("$leaf" in node or "$tensor" in node) and names is not None and not _refers(node, names):
                    raise CorruptCheckpoint("the tree refers to a leaf that is not there", path=where)
            elif kind is list:
                below.extend(node)
            elif kind is int and not -MAX_EXACT_INT <= node <= MAX_EXACT_INT:
                raise CorruptCheckpoint(
                    "the tree holds an integer beyond ±2^53 that is not tagged", path=where
                )
        if (below or referred) and depth > MAX_JSON_DEPTH:
            raise CorruptCheckpoint(f"JSON nested deeper than {MAX_JSON_DEPTH} levels", path=where)
        level = below


def _refers(node: dict[str, Any], names: Collection[str]) -> bool:
    if len(node) != 1:
        return False
    name = node.get("$leaf")
    body = node.get("$tensor")
    if type(body) is list and body:
        name = body[0]
    return type(name) is str and name in names


def _brief(numbers: tuple[int, ...]) -> str:
    text = ",".join(map(str, numbers[:8]))
    return f"[{text},...]" if len(numbers) > 8 else f"[{text}]"
