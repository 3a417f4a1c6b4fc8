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

    Attributes:
        file: The absolute path of the file.
        offset: Bytes from its start.
        box: The box.
    """

    file: str
    offset: int
    box: Box


@dataclass(frozen=True, slots=True)
class Computed:
    """A leaf whose bytes are in no file as they are, for example because they are compressed.

    Attributes:
        write: Writes all of its bytes, in C order. It is called when the leaf is read. The result is kept in
            memory until another such leaf is read.
        files: The files that it reads; none if the bytes are in memory already.
    """

    write: Callable[[BinaryIO], None]
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLeaf:
    """A named array of a foreign checkpoint. In the state of a `Source` it stands for the array.

    Attributes:
        name: Its name, for messages only: the leaf is named by its place in the state.
        dtype: Its element type, by its safetensors name.
        shape: Its shape.
        fragments: Where its elements are. Together they are all of it, and disjoint. A leaf that is
            `computed` has none.
        copies: Further complete copies, which must be equal; `convert` compares them.
        terms: Further complete copies with other values: the leaf is the mean, or the sum, of all.
        reduce: Which of these; empty without `terms`.
        framework: ``"torch"`` or ``"numpy"``: what its own library loads it as.
        computed: How its bytes are computed, if they are.
        is_parameter: Whether it is a parameter of torch.
        requires_grad: Whether it is a tensor that requires gradients.
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

    Attributes:
        path: What the user named.
        kind: The system that wrote it.
        step: The optimizer's steps; None if the checkpoint does not state them.
        state: The tree that a load gives, with a `SourceLeaf` in place of each array.
        tree: The same in the form of our own manifests, with references to `leaves`.
        leaves: The leaves, named by their places.
        aliases: Further names of leaves.
        facts: What is shown to the user: parallel degrees, versions.
        carried: Small files that belong to the model, such as ``config.json``; a Hugging Face target copies
            them.
        arranged: Whether it is arranged as a training state (``model``, ``optimizer``). Otherwise it is what
            the system's own library loads.
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
    """Some elements of a flattened leaf, which lie one after another in a file.

    Args:
        file: The absolute path of the file.
        offset: Where the first of them is.
        start: Its number in the flattened leaf.
        stop: The number after the last.
        shape: The shape of the leaf.
        itemsize: Bytes of an element.

    >>> flat_fragments("/run/rank0.pt", 100, 1, 5, (2, 3), 4)[1]
    SourceFragment(file='/run/rank0.pt', offset=108, box=Box(start=(1, 0), shape=(1, 2)))
    """
    found: list[SourceFragment] = []
    for box in boxes_of_range(shape, start, stop):
        found.append(SourceFragment(file, offset, box))
        offset += itemsize * math.prod(box.shape)
    return tuple(found)
