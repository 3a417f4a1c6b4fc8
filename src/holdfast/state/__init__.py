"""Training state as a tree of named leaves: taken apart for saving, put together again, or filled in place.

- `flatten`: a state -> its tree (JSON nodes), the leaves to store, and which names share memory.
- `unflatten`, `values`, `leaf_names`: a tree -> new objects, only its values, only its leaf names.
- `Restore`: a tree -> an existing state, arrays read straight into its own memory.
- `empty`, `convert`: fresh arrays to read into, and the other framework's view of one.

The rooms: `leaves` (what a leaf is), `node` (what nodes look like), `value_encoder` and `value_decoder`
(single values), `tree` (taking apart), `rebuild` (putting together), `restore` (filling in place) with
`restore_modules`, `restore_optimizers`, `landings` (memory to fill), `overlaps` (where two share some) and
`mismatch`, `arrays`, `torch_arrays` and `torch_objects` (numpy's and torch's sides), `sharded` (arrays of
which a part is here), `rng` (random number generators as an object with a state), `per_rank` (the mark on
what belongs to one rank); these two are imported from there, since the functions have the rooms' names.
Nothing here imports torch until a state holds something of torch's, or a leaf saved from torch is to be
built.
"""

from __future__ import annotations

from holdfast.state.arrays import FreshArrays, check_framework, convert, empty
from holdfast.state.flatten import flatten
from holdfast.state.leaves import Flat, Framework, LeafSource, Sharding, Slot
from holdfast.state.mismatch import LeafMeta, Mismatch
from holdfast.state.node import Node, leaf_names
from holdfast.state.restore import Restore
from holdfast.state.select import prune
from holdfast.state.unflatten import unflatten, values

__all__ = [
    "Flat",
    "Framework",
    "FreshArrays",
    "LeafMeta",
    "LeafSource",
    "Mismatch",
    "Node",
    "Restore",
    "Sharding",
    "Slot",
    "check_framework",
    "convert",
    "empty",
    "flatten",
    "leaf_names",
    "prune",
    "unflatten",
    "values",
]
