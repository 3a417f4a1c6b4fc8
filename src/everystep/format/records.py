"""The records a manifest consists of, and the limits any of them keeps.

Owns the structures only: `everystep.format.manifest` turns them into bytes and back, and
`everystep.format.validate` holds the rules between their fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from everystep.format.checksums import HEX_DIGITS

FORMAT: Final = "everystep/1"

MAX_RANK: Final = 99_999
MAX_DIMENSIONS: Final = 64
MAX_INT: Final = 2**63 - 1
EMBEDDED: Final = "0" * HEX_DIGITS
"""In the place of a header's checksum: the manifest is in that header, and its own digest covers it."""

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]
Index = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]
Hex64 = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{HEX_DIGITS}}}\Z")]


class Fragment(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A box of a leaf and where its bytes (C order inside the box) lie; `offset` is from the file's start."""

    start: Index
    shape: Index
    file: Count
    offset: Count
    nbytes: Count
    chunks: str


class Leaf(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A named array: its logical element type, global shape, and the fragments this part holds of it."""

    name: str
    dtype: str
    shape: Index
    framework: Literal["torch", "numpy"]
    fragments: tuple[Fragment, ...]


class Alias(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Another name for the very same array (tied weights); `of` is the name of a leaf."""

    name: str
    of: str


class ShardFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A shard: its size, and the size (= start of data) and checksum of its header, or `EMBEDDED`.

    One that is not in the checkpoint's own directory names the directory, `volume`, and the `host` that
    wrote it there.
    """

    name: str
    nbytes: Count
    header_nbytes: Count
    header_xxh3: Hex64
    volume: str | None = None
    host: str | None = None


class Part(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one rank wrote.

    `local` are the trees of its rank-local state, by place. `tree` is its state tree, where that is another
    than the root's and this is the first rank to have it.
    """

    rank: Rank
    chunk_nbytes: Count
    files: tuple[ShardFile, ...]
    leaves: tuple[Leaf, ...]
    aliases: tuple[Alias, ...]
    local: dict[str, Any] = {}
    tree: Any = None


class PartRef(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Where another rank's part is, and the size and digest it must have."""

    rank: Rank
    file: str
    nbytes: Count
    xxh3: Hex64


class Root(Struct, frozen=True, kw_only=True):
    """The root manifest. `tree` is a JSON node; `metrics` may be infinite or NaN.

    `trees` are the ranks whose parts have a tree of their own, to be merged into this one in their order.
    `layout` is the description of who wrote what (`everystep.plan.description`), so that a reader opens the
    parts it needs only; empty when one process wrote all to its own directory.
    """

    format: str = FORMAT
    id: str
    step: int
    created: float
    world: int = 1
    metrics: dict[str, float] = {}
    tree: Any
    part: Part
    parts: tuple[PartRef, ...] = ()
    trees: tuple[int, ...] = ()
    layout: bytes = b""
