"""Whether the plain values of ranks agree, so that one copy of them can be stored.

Ranks whose states have the same structure (containers, keys, names of leaves) must have the same values in
it. Each sends digests of its own, and the first of these ranks speaks for all. If structures differ, as
between the stages of a pipeline, the trees of all speakers are stored and merged by readers
(`everystep.state.merging`). The merge must lose nothing: no two speakers may contradict each other anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from everystep.errors import RanksDisagree
from everystep.format.checksums import digest
from everystep.state import LeafSource, Node
from everystep.state.leaf_table import component
from everystep.state.merging import GROUPS, PARAMETERS, is_optimizer, kind_of
from everystep.state.node import (
    DEQUE,
    PER_RANK,
    STATE_DICT,
    UNORDERED,
    deque_body,
    items_of,
    leaf_of,
    pairs_of,
    per_rank_of,
    reference_of,
    tag_of,
    without_order,
)
from everystep.state.unflatten import decode_key
from everystep.store.ranks.meeting import Meeting

_MAX_PLACES = 64
_SHOWN = 8
_STEP = "\x1f"
"""Between the keys of a place: a dot may be part of a key."""


# --- ranks with states of the same structure


@dataclass(frozen=True, slots=True)
class Outline:
    """Digests of a state tree by place, at most 64 of them: of what stands there, by which ranks tell where
    their values differ, and of its structure alone."""

    values: dict[str, str] = field(default_factory=dict)
    structure: dict[str, str] = field(default_factory=dict)


def outline_of(tree: Node, before: Outline) -> Outline:
    """The outline of a tree. Where nothing has changed since an earlier one, the structure has not."""
    found = Outline()
    for place, node in _places(tree).items():
        its = found.values[place] = digest(_canonical(node))
        same = before.values.get(place) == its
        found.structure[place] = before.structure[place] if same else structure_digest(node)
    return found


def values_digest(tree: Node) -> dict[str, str]:
    """Digests of a state tree by place: the values of its outline."""
    return {place: digest(_canonical(node)) for place, node in _places(tree).items()}


def _places(tree: Node, depth: int = 2) -> dict[str, Node]:
    """A tree in pieces: keys of the first `depth` levels. A container that has too many stays one place."""
    places: dict[str, Node] = {"": tree}
    for _ in range(depth):
        inner = {place: list(_children(node, place)) for place, node in places.items()}
        spare_count = _MAX_PLACES - len(places)
        for place in sorted(inner, key=lambda place: len(inner[place])):
            more = inner[place]
            if more and len(more) - 1 <= spare_count:
                spare_count -= len(more) - 1
                del places[place]
                places.update(more)
    return places


def blob_digests(leaves: Iterable[LeafSource]) -> dict[str, str]:
    """Digests of large bytes, by the names of their leaves: they are values, and no sample will do."""
    return {
        leaf.name: digest(leaf.source.owner)
        for leaf in leaves
        if type(leaf.source.owner) is bytes or type(leaf.source.owner) is bytearray
    }


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The places at which two such digests differ, those that only one of them has included."""
    return [place for place in {**mine, **theirs} if mine.get(place) != theirs.get(place)]


def structure_digest(tree: Node) -> str:
    """A digest of a state tree without its plain values: of containers, keys, leaf names and tags."""
    return digest(_canonical(_blank(tree)))


def _children(node: Node, place: str) -> Iterator[tuple[str, Node]]:
    prefix = f"{place}." if place else ""
    if leaf_of(node) is not None:
        return
    pairs = pairs_of(node)
    if pairs is not None:
        for key, value in pairs:
            yield prefix + _key_name(key), value
    else:
        for index, item in enumerate(items_of(node) or ()):
            yield f"{prefix}{index}", item


def _key_name(key: Node) -> str:
    if type(key) is str:
        return component(key)
    data = _canonical(key)
    return data.decode() if _has_sets(data) else component(decode_key(key))


def _has_sets(data: bytes) -> bool:
    """Whether encoded nodes may hold sets, of whose members every process has its own order."""
    return any(b'"%b"' % tag.encode() in data for tag in UNORDERED)


def _canonical(node: Node) -> bytes:
    """A node as bytes that are the same wherever the value is the same."""
    data = msgspec.json.encode(node, order="deterministic")
    if not _has_sets(data):
        return data
    return msgspec.json.encode(without_order(node), order="deterministic")


_SCALARS = ("$int", "$float", "$str")
"""Tags of numbers and strings that JSON cannot say: whether a value needs one is no matter of structure."""


def _blank(node: Node) -> Node:
    if type(node) is list:
        return [_blank(item) for item in node]
    if type(node) is not dict:
        return None
    if reference_of(node) is not None:
        return node
    tag = tag_of(node)
    if tag == PER_RANK:
        return node
    if tag is None:
        return {key: _blank(value) for key, value in node.items()}
    if tag == DEQUE:
        items, limit = deque_body(node[tag])
        return {tag: [_blank(items), limit]}
    items_here = items_of(node)
    if items_here is not None:
        return {tag: _blank(items_here)}
    pairs = pairs_of(node)
    if pairs is not None:
        inner: list[Node] = [[key, _blank(value)] for key, value in pairs]
        return {tag: [None, *inner] if tag == STATE_DICT else inner}
    return None if tag in _SCALARS else {tag: None}


# --- ranks with states of different structures


@dataclass(frozen=True, slots=True)
class Facts:
    """What a tree says, by place, that no other may contradict: what stands there, and digests of values."""

    structure: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def facts_of(tree: Node) -> Facts:
    """By the rules of `merge_trees`: where it unites, each may say what the others do not."""
    facts = Facts()
    _tell(tree, "", facts)
    return facts


def _tell(node: Node, place: str, facts: Facts) -> None:
    kind = kind_of(node)
    pairs = None if kind is None else pairs_of(node)
    items = None if kind is None else items_of(node)
    if pairs is not None:
        facts.structure[place] = str(kind)
        entries = {_key_text(key): value for key, value in pairs}
        groups = entries.get(GROUPS) if is_optimizer(entries) else None
        for key, value in entries.items():
            if groups is None or key != GROUPS:
                _tell(value, place + _STEP + key, facts)
        if groups is not None:
            _tell_groups(groups, place + _STEP + GROUPS, facts)
    elif items is not None and any(type(item) is dict or type(item) is list for item in items):
        facts.structure[place] = f"{kind} of {len(items)}"
        for index, item in enumerate(items):
            _tell(item, f"{place}{_STEP}{index}", facts)
    elif reference_of(node) is not None or per_rank_of(node) is not None:
        facts.structure[place] = _canonical(node).decode()
    else:
        facts.structure[place] = "a value" if items is None else f"{kind} of {len(items)} values"
        facts.values[place] = digest(_canonical(node))


def _tell_groups(groups: Node, place: str, facts: Facts) -> None:
    """An optimizer's groups are united by position, and so are their parameters; all else is one for all."""
    facts.structure[place] = "groups of parameters"
    for position, group in enumerate(items_of(groups) or ()):
        for key, value in pairs_of(group) or ():
            if key != PARAMETERS:
                _tell(value, f"{place}{_STEP}{position}{_STEP}{_key_text(key)}", facts)


def _key_text(key: Node) -> str:
    """Different for different keys: 1 and "1" are two."""
    return key if type(key) is str else f"\x1e{_canonical(key).decode()}"


def check_structures(meeting: Meeting, structure: Mapping[str, str]) -> None:
    """`RanksDisagree`, on all ranks, where states cannot be made one.

    A rank for which another speaks gives an empty structure.
    """

    def compare(messages: Sequence[bytes]) -> bytes:
        said = [msgspec.msgpack.decode(data, type=dict[str, str]) for data in messages]
        return msgspec.msgpack.encode(contradictions(dict(enumerate(said))))

    verdict = meeting.agree(msgspec.msgpack.encode(structure), compare)
    found = msgspec.msgpack.decode(verdict, type=list[tuple[str, int, int]])
    if found:
        raise _contradiction(found, "different structures here")


def check_values(
    digests: Mapping[int, Mapping[str, str]], facts: Mapping[int, Mapping[str, str]], speakers: Sequence[int]
) -> None:
    """`RanksDisagree` when one copy of the plain values of all ranks would lose something.

    `digests`: of every rank, as `values_digest` makes them; `facts`: of those that speak, where several do.
    """
    for rank, values in digests.items():
        first = speakers[rank]
        different = differing(digests[first], values) if first != rank else []
        if different:
            raise _other_values(different, first, rank)
    found = contradictions(facts)
    if found:
        raise _contradiction(found, "different values here")


def contradictions(facts: Mapping[int, Mapping[str, str]]) -> list[tuple[str, int, int]]:
    """Places of which ranks say different things, the first few, each with two of these ranks."""
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, tuple[str, int, int]] = {}
    for rank, said in sorted(facts.items()):
        for place, its in said.items():
            other, known = first.setdefault(place, (rank, its))
            if known != its and len(found) < _SHOWN:
                found.setdefault(place, (place, other, rank))
    return list(found.values())


def _other_values(places: Sequence[str], first: int, rank: int) -> RanksDisagree:
    return RanksDisagree(
        f"ranks {first} and {rank} have different values at {', '.join(map(repr, places[:_SHOWN]))}. Only "
        f"one can be stored. {_ADVICE}",
        ranks=(first, rank),
    )


def _contradiction(found: Sequence[tuple[str, int, int]], how: str) -> RanksDisagree:
    lines = [f"{_in_words(place)!r}: ranks {other} and {rank} have {how}" for place, other, rank in found]
    return RanksDisagree(
        "the states of the ranks contradict each other and cannot be stored as one:\n    "
        + "\n    ".join(lines)
        + f"\n  {_ADVICE}",
        ranks=sorted({rank for _, *ranks in found for rank in ranks}),
    )


_ADVICE = "Mark state that is meant to differ with everystep.per_rank; make everything else equal"


def _in_words(place: str) -> str:
    return place.replace("\x1e", "").replace(_STEP, ".").removeprefix(".")
