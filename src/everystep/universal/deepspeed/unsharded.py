"""Optimizer state without ZeRO: whole, and counted instead of named.

It is in the model files, or, with a mixture of experts, in a file for each expert-parallel rank. Which
parameter each number means is known where shapes prove it. Otherwise the numbers stay, if one rank has all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from everystep.errors import IncompleteCheckpoint, UnsupportedSource
from everystep.universal.deepspeed.experts import Experts
from everystep.universal.deepspeed.files import Folder
from everystep.universal.deepspeed.names import BUFFERS, FP32, MODULE, OPTIMIZER_DICT
from everystep.universal.deepspeed.optimizer_files import OptimizerGroup, ParameterState, RankOptimizer
from everystep.universal.optimizer_names import is_optimizer_state, parameter_names
from everystep.universal.torch_file.leaves import lying_leaf
from everystep.universal.torch_file.reading import StoredTensor


def read_unsharded(folder: Folder, mp: int) -> RankOptimizer:
    """The state of one model-parallel rank, of a checkpoint without ZeRO."""
    made = RankOptimizer(0)
    files = {rank: path for (of, rank), path in folder.files.expert_optimizers.items() if of == mp}
    if not files:
        whole = folder.degrees.tensor * folder.degrees.pipeline == 1
        _add(made, folder.model_file(mp), folder.model(mp).get("optimizer"), _dense(folder, mp), {}, whole)
        return made
    experts = _experts(folder, mp)
    numbers = Experts.of(folder, [experts]).local  # of whole layers: the files have the experts of all ranks
    for rank in range(len(files)):
        if rank not in files:
            raise IncompleteCheckpoint(
                f"the optimizer file of expert-parallel rank {rank} is missing", path=folder.path
            )
        tree = folder.read(files[rank]).get("optimizer")
        made.expert_degree = degree = _degree(files[rank], tree)
        mine = {
            name: stored
            for name, stored in experts.items()
            if Experts.number(name) * degree // numbers[Experts.prefix(name)] == rank % degree
        }
        _add(made, files[rank], tree, _dense(folder, mp), mine)
    return made


def _degree(path: str, tree: Any) -> int:
    """How many ranks share the experts of a layer: the groups of experts are called ``ep_size_N``."""
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    named = [group.get("name") for group in groups or () if isinstance(group, dict) and group.get("moe")]
    found = {int(name[8:]) for name in named if isinstance(name, str) and re.fullmatch(r"ep_size_\d+", name)}
    if len(found) != 1 or 0 in found:
        raise UnsupportedSource(
            f"{path}: groups of experts {named}; only one size of expert parallelism is read"
        )
    return found.pop()


def _dense(folder: Folder, mp: int) -> dict[str, StoredTensor]:
    content = folder.model(mp)
    module, skipped = content.get(MODULE), set(content.get(BUFFERS) or ())
    if not isinstance(module, dict):
        return {}
    seen: set[StoredTensor] = set()
    found: dict[str, StoredTensor] = {}
    for name, stored in module.items():
        if isinstance(stored, StoredTensor) and name not in skipped and stored not in seen:
            seen.add(stored)
            found[name] = stored
    return found


def _experts(folder: Folder, mp: int) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path in folder.expert_files(mp):
        found.update({k: v for k, v in folder.read(path).items() if isinstance(v, StoredTensor)})
    return dict(sorted(found.items(), key=lambda item: Experts.number(item[0])))


def _add(
    made: RankOptimizer,
    path: str,
    tree: Any,
    dense: Mapping[str, StoredTensor],
    experts: Mapping[str, StoredTensor],
    whole: bool = False,
) -> None:
    """`whole`: there is one model-parallel rank, so its numbers are those of the whole model."""
    if tree is None:
        return
    masters: Any = None
    if isinstance(tree, dict) and OPTIMIZER_DICT in tree:  # weights in half precision
        masters, tree = tree.get("fp32_groups"), tree[OPTIMIZER_DICT]
    if not is_optimizer_state(tree):
        raise UnsupportedSource(f"{path}: the optimizer's state is in a form that is not known")
    groups: Sequence[Mapping[str, Any]] = tree["param_groups"]
    names: dict[Any, str] = {}
    for moe, model in ((False, dense), (True, experts)):
        some = [group for group in groups if bool(group.get("moe")) is moe]
        wanted = {key for group in some for key in group["params"]}
        if not wanted:
            continue
        mine = {key: entry for key, entry in tree["state"].items() if key in wanted}
        named = parameter_names(mine, some, model)
        if not wanted <= set(named) and not experts and whole:
            made.counted = tree if masters is None else {**tree, "fp32_groups": masters}
            return
        if not wanted <= set(named):
            raise UnsupportedSource(
                f"{path}: the optimizer counts {len(wanted)} parameters, and nothing proves which of the "
                f"{len(model)} of the model each one is"
            )
        names.update(named)
    shapes = {**dense, **experts}
    flat = [one for group in masters for one in group] if isinstance(masters, list) else []
    keys = [key for group in groups for key in group["params"]]
    for number, key in enumerate(keys):
        name = names[key]
        state = ParameterState()
        if number < len(flat) and isinstance(flat[number], StoredTensor):
            state.tensors[FP32] = lying_leaf(name, flat[number])
        for kind, entry in tree["state"].get(key, {}).items():
            if not isinstance(entry, StoredTensor):
                state.values[kind] = entry
            elif entry.shape == shapes[name].shape:
                state.tensors[kind] = lying_leaf(name, entry)
            else:
                state.numbers[kind] = entry
        # Parameters that all expert-parallel ranks share are in the file of each; the first one counts.
        made.states.setdefault(name, state)
        made.shapes.setdefault(name, shapes[name].shape)
    _add_groups(made, [OptimizerGroup(group, [names[key] for key in group["params"]]) for group in groups])


def _add_groups(made: RankOptimizer, groups: list[OptimizerGroup]) -> None:
    """The groups of one more expert-parallel rank, whose experts are others."""
    if made.groups:
        pairs = zip(made.groups, groups, strict=False)
        groups = [
            OptimizerGroup(old.options, list(dict.fromkeys((*old.names, *new.names)))) for old, new in pairs
        ]
    made.groups = groups
