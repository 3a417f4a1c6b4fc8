"""How DeepSpeed's universal layout says that a parameter is cut over tensor-parallel ranks, as our rules.

The layout holds whole parameters. Beside each lies what a tensor-parallel reader needs to cut it:
``cat_dim``, ``param_n_sub_params`` (equal parts), ``sub_param_shape`` (parts of given sizes),
``vocab_tensor`` (padded along dimension 0 as the reader needs). What is cut in none of these ways is the same
on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.errors import CorruptCheckpoint, SpecError
from everystep.universal.deepspeed.names import SUBPARAM_SHAPE
from everystep.universal.rules import (
    Flat,
    Fused,
    Layout,
    Pad,
    Partial,
    Rule,
    Shard,
    fused,
    pad,
    replicated,
    rule,
    shard,
)
from everystep.universal.torch_file.pickle_machine import InertObject
from everystep.universal.torch_file.pickle_writer import Instance

PARAM, CAT_DIM, PARTS, SIZES, VOCABULARY = (
    "param",
    "cat_dim",
    "param_n_sub_params",
    "sub_param_shape",
    "vocab_tensor",
)


def fields_of_rule(name: str, shape: tuple[int, ...], found: Rule) -> dict[str, object]:
    """What lies beside a parameter that is cut by a rule. `SpecError` if the layout cannot say it."""
    layout = found.layout
    fields: dict[str, object] = {}
    whole = isinstance(layout, Shard | Fused) and layout.dim >= len(shape)
    pieces = [layout.pieces] if isinstance(layout, Shard) else []
    pieces += [part.pieces for part in layout.parts] if isinstance(layout, Fused) else []
    if (
        whole
        or any(number is not None for number in pieces)
        or isinstance(layout, Flat)
        or (isinstance(layout, Partial) and layout.reduce == "sum")
        or any(found_pad.dim != 0 for found_pad in found.pads)
    ):
        raise SpecError(
            f"parameter {name!r}: DeepSpeed's universal layout cannot hold what rule {found.match} ({found}) "
            f"says of shape {list(shape)}",
            names=[name],
        )
    if isinstance(layout, Shard):
        fields[CAT_DIM] = layout.dim
    elif isinstance(layout, Fused):
        sizes = [part.size for part in layout.parts]
        if len(set(sizes)) == 1:
            fields |= {CAT_DIM: layout.dim, PARTS: len(sizes)}
        else:
            unit = shape[layout.dim] // sum(sizes) if layout.shares else 1
            parts = tuple(unit * size for size in sizes)
            view = (*shape[: layout.dim], parts, *shape[layout.dim + 1 :])
            attributes = {"patterns": [], "shape": view, "partition_dim": layout.dim}
            fields[SIZES] = Instance(SUBPARAM_SHAPE, attributes)
    if found.pads:
        fields[VOCABULARY] = True
    return fields


def rule_of_fields(fields: Mapping[str, Any], shape: tuple[int, ...], path: str) -> Rule:
    """The rule that cuts a parameter of this whole shape, out of what lies beside it in the file `path`."""
    layout = _layout(fields, path)
    pads: tuple[Pad, ...] = (pad(0, shape[0]),) if fields.get(VOCABULARY) and shape and shape[0] else ()
    return rule("*", layout, *pads)


def _layout(fields: Mapping[str, Any], path: str) -> Layout:
    sizes = fields.get(SIZES)
    if sizes is not None:
        known = sizes.attributes if isinstance(sizes, InertObject) else {}
        view, dim = known.get("shape"), known.get("partition_dim")
        if type(dim) is int and isinstance(view, tuple | list) and 0 <= dim < len(view):
            parts = view[dim] if isinstance(view[dim], tuple | list) else [view[dim]]
            if parts and all(type(part) is int and part > 0 for part in parts):
                return fused(dim, list(parts))
        raise CorruptCheckpoint(f"{SIZES!r} is damaged", path=path)
    dim, count = fields.get(CAT_DIM), fields.get(PARTS, 1)
    if dim is None:
        return replicated()
    if type(dim) is not int or type(count) is not int or not 0 <= dim < 64 or not 0 < count < 1 << 20:
        raise CorruptCheckpoint(f"{CAT_DIM!r} or {PARTS!r} is damaged", path=path)
    return shard(dim) if count == 1 else fused(dim, count)
