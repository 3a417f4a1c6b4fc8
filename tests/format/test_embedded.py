"""A manifest in its shard's header: found, covered to the last byte, and wary of hostile files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint
from everystep.format.embedded import (
    EMBEDDING_SHARD,
    PEEK_NBYTES,
    check_header,
    embed_root,
    embeds_root,
    extract_root,
)
from everystep.format.records import EMBEDDED, Fragment, Leaf, Part, Root, ShardFile
from everystep.format.shard import HeaderEntry, build_header, entry_table, parse_header
from support.states import handmade_checkpoints as making

WHERE = f"runs/a/step-000000000120/{EMBEDDING_SHARD}"
DATA = np.arange(12, dtype="<f4").tobytes()
TABLE = entry_table([HeaderEntry("w", "F32", (3, 4), 0, len(DATA))])
LIMIT = 1 << 20
OPENING = b'{"__metadata__":{"everystep":"{\\"xxh3\\":\\"'


def describe(header_nbytes: int, **changes: Any) -> Root:
    fragment = Fragment((0, 0), (3, 4), 0, header_nbytes, len(DATA), making.checksums(DATA))
    file = ShardFile(EMBEDDING_SHARD, header_nbytes + len(DATA), header_nbytes, EMBEDDED)
    part = Part(0, making.CHUNK, (file,), (Leaf("w", "F32", (3, 4), "numpy", (fragment,)),), ())
    return making.root(part, **changes)


def embed(describe: Callable[[int], Root] = describe) -> bytes:
    header = embed_root(describe, TABLE, {"format": "np"}, LIMIT)
    assert header is not None
    return header


def extract(header: bytes) -> Root:
    return extract_root(header, len(header) + len(DATA), WHERE)


@pytest.mark.parametrize("text", ["", 'with "quotes", \\ and \x00', "é" * 3000, "x" * 100_000])
def test_what_was_put_in_comes_out(text: str) -> None:
    tree = {"w": {"$leaf": "w"}, "text": text}
    header = embed(lambda nbytes: describe(nbytes, tree=tree))
    assert len(header) % 4096 == 0
    assert embeds_root(header[:PEEK_NBYTES])
    assert extract(header) == describe(len(header), tree=tree)
    assert parse_header(header, len(header) + len(DATA), WHERE).entries[0].name == "w"


@pytest.mark.parametrize("limit", [0, 4095, 8192])
def test_too_little_room_is_none(limit: int) -> None:
    tree = {"w": {"$leaf": "w"}, "text": "x" * 8192}
    assert embed_root(lambda nbytes: describe(nbytes, tree=tree), TABLE, {}, limit) is None


def test_the_digest_is_where_the_page_says_and_of_what_it_says() -> None:
    header = embed()
    at = 8 + len(OPENING)
    assert header[8:at] == OPENING
    zeroed = header[:at] + b"0" * 16 + header[at + 16 :]
    assert xxhash.xxh3_64_hexdigest(zeroed).encode() == header[at : at + 16]


def test_a_flipped_bit_in_any_byte_is_damage() -> None:
    header = embed()
    for offset in range(len(header)):
        for bit in range(8) if offset < 600 else (offset % 8,):
            bad = bytearray(header)
            bad[offset] ^= 1 << bit
            with pytest.raises(CorruptCheckpoint) as caught:
                extract(bytes(bad))
            assert caught.value.path == WHERE
            with pytest.raises(CorruptCheckpoint):
                check_header(bytes(bad), len(header) + len(DATA), WHERE)


def test_a_shard_of_a_checkpoint_of_two_files_is_incomplete() -> None:
    header = build_header([HeaderEntry("w", "F32", (3, 4), 0, len(DATA))], {"format": "np"})
    with pytest.raises(IncompleteCheckpoint, match="no manifest"):
        extract(header)


# --- hostile: the digest is right ---------------------------------------------------------------------------


def seal(text: bytes, length: int | None = None) -> bytes:
    """A right digest for any text of a header. Written from docs/format.md."""
    assert text.startswith(OPENING)
    text = text.ljust(len(text) + -(len(text) + 8) % 4096)
    header = (len(text) if length is None else length).to_bytes(8, "little") + text
    at = 8 + len(OPENING)
    zeroed = header[:at] + b"0" * 16 + header[at + 16 :]
    return header[:at] + xxhash.xxh3_64_hexdigest(zeroed).encode() + header[at + 16 :]


def made_of(manifest: dict[str, Any] | str, **others: object) -> bytes:
    if isinstance(manifest, dict):
        manifest = json.dumps(manifest, separators=(",", ":"))
    entry = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, len(DATA)]}
    table = {"__metadata__": {"everystep": manifest}, "w": entry, **others}
    return json.dumps(table, separators=(",", ":")).encode()


def honest() -> dict[str, Any]:
    texts: dict[str, str] = json.loads(embed()[8:])["__metadata__"]
    value: dict[str, Any] = json.loads(texts["everystep"])
    return value


def test_the_honest_one_is_accepted() -> None:
    assert extract(seal(made_of(honest()))) == describe(4096)


def file(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["part"]["files"][0]
    return found


ATTACKS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "another header's size": ("another header", lambda v: file(v).update(header_nbytes=8)),
    "a checksum of its own": ("one file", lambda v: file(v).update(header_xxh3="1" * 16)),
    "another volume": ("one file", lambda v: file(v).update(name="r00000.v1.safetensors")),
    "a path": ("not one that rank", lambda v: file(v).update(name="../r00000.v0.safetensors")),
    "several ranks": ("one file", lambda v: v.update(world=2)),
    "no files": ("fragment in file", lambda v: v["part"].update(files=[])),
    "a newer format": ("format", lambda v: v.update(format="everystep/9")),
    "a leaf beyond the file": ("not in the data", lambda v: file(v).update(nbytes=4096)),
    "a field too many": ("unknown field", lambda v: v.update(extra=1)),
    "a gigantic shape": ("beyond", lambda v: v["part"]["leaves"][0].update(shape=[2**62, 2**62])),
}


@pytest.mark.parametrize(("match", "attack"), ATTACKS.values(), ids=ATTACKS)
def test_a_hostile_manifest_is_refused(match: str, attack: Callable[[dict[str, Any]], object]) -> None:
    value = honest()
    attack(value)
    with pytest.raises(CorruptCheckpoint, match=match) as caught:
        extract(seal(made_of(value)))
    assert caught.value.path == WHERE


def test_deep_nesting_is_refused() -> None:
    text = json.dumps(honest(), separators=(",", ":"))
    deep = text.replace('"tree":', '"tree":' + "[" * 5000).replace(',"part":', "]" * 5000 + ',"part":')
    with pytest.raises(CorruptCheckpoint, match="nested"):
        extract(seal(made_of(deep)))


def test_repeated_keys_are_refused_in_manifest_metadata_and_header() -> None:
    text = json.dumps(honest(), separators=(",", ":"))
    twice = text[:-1] + ',"step":120}'
    with pytest.raises(CorruptCheckpoint):
        extract(seal(made_of(twice)))
    whole = made_of(honest())
    for bad in (
        whole.replace(b'},"w":', b',"everystep":"{}"},"w":'),
        whole.replace(b'},"w":', b'},"__metadata__":{},"w":', 1),
    ):
        with pytest.raises(CorruptCheckpoint, match="twice"):
            extract(seal(bad))


@pytest.mark.parametrize("length", [0, 1, 2**20, 100_000_001, 2**63, 2**64 - 1])
def test_a_length_that_lies_is_refused(length: int) -> None:
    with pytest.raises(CorruptCheckpoint):
        extract(seal(made_of(honest()), length))


def test_what_is_not_text_or_not_json_is_refused() -> None:
    for bad in (
        made_of(honest()).replace(b'},"w":', b'\xff},"w":', 1),
        made_of(honest())[:-1],
        made_of(json.dumps(honest(), separators=(",", ":"))[:-1]),
        made_of(honest(), nested={"a": {"b": 1}}),
    ):
        with pytest.raises(CorruptCheckpoint):
            extract(seal(bad))
