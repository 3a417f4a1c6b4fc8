"""Reads the leaves of a foreign checkpoint by hand, the slow and obvious way."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from everystep.format import dtypes
from everystep.universal.source import Source, SourceFragment, SourceLeaf
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.pickle_classes import TORCH_DTYPES
from everystep.universal.training_state import arranged_names

_TORCH = {ours: getattr(torch, name) for name, ours in TORCH_DTYPES.items()}


def assembled(leaf: SourceLeaf, fragments: Sequence[SourceFragment] | None = None) -> torch.Tensor:
    """A leaf as a tensor. Fails if its fragments overlap or leave something out."""
    if leaf.computed is not None:
        made = io.BytesIO()
        leaf.computed.write(made)
        return torch.frombuffer(bytearray(made.getvalue()), dtype=_TORCH[leaf.dtype]).reshape(leaf.shape)
    size = dtypes.itemsize(leaf.dtype)
    found = np.zeros((*leaf.shape, size), dtype=np.uint8)
    times = np.zeros(leaf.shape, dtype=np.int64)
    for fragment in leaf.fragments if fragments is None else fragments:
        nbytes = fragment.box.volume * size
        with open(fragment.file, "rb") as file:
            file.seek(fragment.offset)
            data = file.read(nbytes)
        assert len(data) == nbytes, f"{leaf.name}: {fragment} reaches past the end of the file"
        where = tuple(slice(a, b) for a, b in zip(fragment.box.start, fragment.box.stop, strict=True))
        found[where] = np.frombuffer(data, dtype=np.uint8).reshape((*fragment.box.shape, size))
        times[where] += 1
    assert (times == 1).all(), f"{leaf.name}: elements are missing or doubled"
    flat = torch.frombuffer(bytearray(found.tobytes()), dtype=torch.uint8) if found.size else torch.empty(0)
    kind = _TORCH[leaf.dtype]
    return flat.view(kind).reshape(leaf.shape) if found.size else torch.empty(leaf.shape, dtype=kind)


def source_of_leaves(
    path: str,
    leaves: Iterable[SourceLeaf],
    *,
    aliases: Mapping[str, str] | None = None,
    step: int | None = None,
    groups: list[Any] | None = None,
    **rest: Any,
) -> Source:
    """A source of leaves at the places that their names say; `groups` are those of its optimizer."""
    named = {leaf.name: leaf for leaf in leaves}
    named.update({name: named[of] for name, of in (aliases or {}).items()})
    state = {**arranged_names(path, named), **rest}
    if groups is not None:
        state["optimizer"]["param_groups"] = groups
    return source_of(path, "test", state, step=step)


def by_name(source: Source) -> dict[str, torch.Tensor]:
    """Every leaf of a source, aliases included."""
    leaves = {leaf.name: assembled(leaf) for leaf in source.leaves}
    assert len(leaves) == len(source.leaves), "two leaves have one name"
    return {**leaves, **{name: leaves[leaf] for name, leaf in source.aliases.items()}}


def assert_same(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Equal in type, shape and every bit."""
    expected = expected.detach().contiguous()
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    a = found.contiguous().flatten().view(torch.uint8) if found.numel() else found
    b = expected.flatten().view(torch.uint8) if expected.numel() else expected
    assert torch.equal(a, b), f"{name} differs"
