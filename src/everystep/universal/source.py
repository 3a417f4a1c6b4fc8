"""What a foreign checkpoint holds, and where its bytes lie: the records that every reader of a system makes.

A reader (`everystep.universal.readers`) reads the metadata of a checkpoint and describes it with these
records. It reads no arrays. `everystep.universal.foreign_checkpoint` turns the description into the records
of our own format, so one path reads native and foreign checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

from everystep.format.geometry import Box, boxes_of_range
from everystep.state import Node, values


@dataclass(frozen=True, slots=True)
class SourceFragment:
    """Elements of a box of a leaf (in C order) that lie one after another in a file.

    `file` is an absolute path, `offset` counts bytes from its start.
    """

    file: str
    offset: int
    box: Box


@dataclass(frozen=True, slots=True)
class Computed:
    """The bytes of a leaf that lie in no file as they are, such as compressed ones.

    `write` writes exactly all of them, in C order. It is called when the leaf is read, and the result is kept
    in memory until another such leaf is read. `files` are those that it reads; without any, the bytes are in
    memory already.
    """

    write: Callable[[BinaryIO], None]
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLeaf:
    """A named array: `fragments` are together all of it, and disjoint.

    In the state of a `Source` it stands for an array, and its name is for messages only: the leaf is named by
    its place there. Types have the names of safetensors. `copies` are further complete copies, which must be
    equal: `convert` compares them. `terms` are further complete copies with other values: the leaf is the
    mean, or the sum, of all. A leaf that is `computed` has no fragments. `is_parameter` and `requires_grad`
    are those of a torch tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fragments: tuple[SourceFragment, ...]
    copies: tuple[tuple[SourceFragment, ...], ...] = ()
    terms: tuple[tuple[SourceFragment, ...], ...] = ()
    reduce: Literal["", "mean", "sum"] = ""
    framework: Literal["torch", "numpy"] = "torch"
    computed: Computed | None = None
    is_parameter: bool = False
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign checkpoint, as `everystep.universal.state_tree.source_of` makes it.

    `path` is what the user named, `step` the optimizer's steps, None if the checkpoint does not say. `state`
    is the tree that a load gives, with a `SourceLeaf` in place of each array. `tree`, `leaves` and `aliases`
    are the same in the form of our own manifests. `arranged`: it is a training state (``model``,
    ``optimizer``); else it is what the system's own library loads. `facts` are shown to the user: parallel
    degrees, versions. `carried` are small files that belong to the model, such as ``config.json``; a Hugging
    Face target gets copies of them.
    """

    path: str
    kind: str
    step: int | None
    state: object
    tree: Node
    leaves: tuple[SourceLeaf, ...]
    aliases: Mapping[str, str]
    facts: Mapping[str, str] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    arranged: bool = True

    @property
    def values(self) -> dict[str, object]:
        """Everything that is not an array, by dotted name."""
        return values(self.tree, local={}, where=self.path)


def flat_fragments(
    file: str, offset: int, start: int, stop: int, shape: tuple[int, ...], itemsize: int
) -> tuple[SourceFragment, ...]:
    """Elements `start` to `stop` of a flattened leaf, which lie from `offset` on in a file.

    >>> flat_fragments("/run/rank0.pt", 100, 1, 5, (2, 3), 4)[1]
    SourceFragment(file='/run/rank0.pt', offset=108, box=Box(start=(1, 0), shape=(1, 2)))
    """
    found: list[SourceFragment] = []
    for box in boxes_of_range(shape, start, stop):
        found.append(SourceFragment(file, offset, box))
        offset += itemsize * math.prod(box.shape)
    return tuple(found)
