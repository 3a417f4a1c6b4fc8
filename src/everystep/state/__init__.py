"""Training state as a tree of named leaves: taken apart for saving, put together again, or filled in place.

- `flatten`: a state -> its tree (JSON nodes), the leaves to store, and which names share memory.
- `unflatten`, `values`, `leaf_names`: a tree -> new objects, only its values, only its leaf names.
- `Restore`: a tree -> an existing state, arrays read straight into its own memory.
- `empty`, `convert`: fresh arrays to read into, and the other framework's view of one.

| module | what it owns |
|---|---|
| `leaves`, `node` | what a leaf is; what the nodes of a tree look like |
| `value_encoder`, `value_decoder`, `omegaconf_values` | values, and configurations, to nodes and back |
| `refusals` | what a state cannot hold, in words |
| `flatten`, `leaf_table` | taking a state apart; names of leaves, and which of them share memory |
| `unflatten`, `select`, `merging` | putting a state together; part of a tree; the trees of several ranks |
| `restore`, `restore_context`, `restore_modules`, `restore_optimizers` | filling a state in place |
| `destinations`, `overlaps`, `targets`, `mismatch` | memory to fill, arrays that share it, misfits |
| `arrays`, `numpy_arrays`, `torch_arrays`, `torch_objects` | numpy and torch |
| `jax_arrays` | arrays of JAX, which are read and made here, but never filled in place |
| `sharded`, `fsdp1`, `boxed` | arrays of which a part is here |
| `rng`, `marks` | random number generators as one object; the marks on state that differs between ranks |

Import `rng` from its module: the function has the module's name. Nothing here imports torch until
a state holds a torch object, or a leaf saved from torch is built; or JAX, until a state holds its arrays.
"""

from __future__ import annotations

from everystep.state.arrays import FreshArrays, check_framework, convert, empty
from everystep.state.flatten import flatten
from everystep.state.leaves import FlatState, FragmentPlace, Framework, LeafSource, Sharding
from everystep.state.mismatch import LeafMeta, Mismatch
from everystep.state.node import Node, leaf_names
from everystep.state.restore import Restore
from everystep.state.select import prune
from everystep.state.unflatten import unflatten, values

__all__ = [
    "FlatState",
    "FragmentPlace",
    "Framework",
    "FreshArrays",
    "LeafMeta",
    "LeafSource",
    "Mismatch",
    "Node",
    "Restore",
    "Sharding",
    "check_framework",
    "convert",
    "empty",
    "flatten",
    "leaf_names",
    "prune",
    "unflatten",
    "values",
]
