"""Which tensors the file of each Megatron rank has, under which names: for the target `megatron`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everystep.errors import SpecError, UnsupportedState
from everystep.universal.foreign_names import foreign_name
from everystep.universal.items import MODEL, Item, Job
from everystep.universal.megatron.optimizer import NAMES
from everystep.universal.rules import Flat, Replicated, Rule, Unique
from everystep.universal.spec import Spec
from everystep.universal.split import LocalPlan, split, stage_layers
from everystep.universal.torch_file.pickle_writer import Instance, PendingTensor
from everystep.universal.torch_file.writing import LeafBytes

OPTIMIZER = "optimizer."
_GROUPS = "optimizer.param_groups"
_STATE = "state."
_LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d+)(\..*)", re.DOTALL)
_FIRST_STAGE = re.compile(r"embed|(?:^|\.)(?:wte|wpe)\.", re.IGNORECASE)
_DIVISIBLE_BY = 128
_WORDS = ("language_model.embedding.word_embeddings.weight", "embedding.word_embeddings.weight")
_OUTPUTS = ("language_model.output_layer.weight", "output_layer.weight")
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class _Parameter:
    """`name` is that in the files, with the layer's number in the whole model; `leaf` our name of it."""

    name: str
    leaf: str
    item: Item
    rule: Rule
    stage: int
    plans: tuple[LocalPlan, ...]


class Ranks:
    """The contents of all files. Raises `SpecError` for what cannot be laid out."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._values = job.checkpoint.values
        self._items = {item.name: item for item in job.items}
        self._items |= {name: self._items[of] for name, of in job.tied.items()}
        self._args = self._below("args.")
        self.spec = job.spec or self._preset()
        divisor = self._args.get("make_vocab_size_divisible_by")
        by = divisor if isinstance(divisor, int) and divisor > 0 else _DIVISIBLE_BY
        self._target = replace(job.layout, divisible_by=by)
        self._parameters = self._place()
        self._states = self._optimizer_states()

    def content(self, rank: int, stage: int) -> dict[str, object]:
        """What the file of a rank holds, with tensors whose bytes come later."""
        mine = [parameter for parameter in self._parameters if parameter.stage == stage]
        first = self._layers[stage].start
        model = {
            _local_name(parameter.name, first): _pending(parameter.item, parameter.plans[rank])
            for parameter in mine
        }
        content: dict[str, object] = {
            "args": Instance("argparse.Namespace", self._arguments()),
            "checkpoint_version": self._version(),
            "iteration": self._job.checkpoint.step,
            "model": _nested(model),
        }
        if self._states:
            content["optimizer"] = self._optimizer(mine, rank)
        scheduler = self._below("opt_param_scheduler.")
        if scheduler:
            content["opt_param_scheduler"] = scheduler
        return content

    # --- parameters

    def _preset(self) -> Spec:
        """The preset for Megatron's names, with what the source says about the model."""
        names = {name.removeprefix(MODEL) for name in self._items if name.startswith(MODEL)}
        words = next((self._items[MODEL + name].shape[0] for name in _WORDS if name in names), None)
        own_output = any(
            MODEL + name in self._items and MODEL + name not in self._job.tied for name in _OUTPUTS
        )
        return Spec.preset(
            "megatron-gpt",
            vocab_size=words,
            swiglu=bool(self._args.get("swiglu")),
            checkpoint_version=self._version(),
            tied_output=not own_output,
        )

    def _version(self) -> float:
        version = self._values.get("checkpoint_version")
        return version if isinstance(version, (int, float)) else 3.0

    def _place(self) -> list[_Parameter]:
        found: list[tuple[str, str, Rule]] = []
        ties: list[tuple[str, str, Rule]] = []
        for leaf in self._items:
            if not leaf.startswith(MODEL):
                continue
            name, rule = foreign_name(self.spec, leaf.removeprefix(MODEL))
            if rule.tied is None:
                found.append((name, leaf, rule))
            elif leaf in self._job.tied:
                ties.append((name, leaf, rule))
            else:
                raise SpecError(
                    f"the spec ties {name!r} to {rule.tied.to!r}, but the source has both", names=[name]
                )
        self._layers = self._stages([name for name, _, _ in found])
        placed = [self._parameter(name, leaf, rule) for name, leaf, rule in found]
        return placed + self._heads(placed, ties)

    def _stages(self, names: Sequence[str]) -> tuple[range, ...]:
        """The layers of each stage."""
        matched = [layer for name in names if (layer := _LAYER.fullmatch(name)) is not None]
        stacks = sorted({layer[1] for layer in matched})
        numbers = sorted({int(layer[2]) for layer in matched})
        if len(stacks) > 1:
            raise SpecError(f"there are several stacks of layers: {', '.join(stacks)}; Megatron's have one")
        if numbers != list(range(len(numbers))):
            raise SpecError(f"layers are numbered {numbers[:20]}, not from 0 on")
        if self._target.pp > 1 and len(numbers) < self._target.pp:
            raise SpecError(
                f"{len(numbers)} layers (parameters with 'layers.N.' in their names) cannot be cut into "
                f"{self._target.pp} stages"
            )
        return stage_layers(len(numbers), self._target.pp)

    def _parameter(self, name: str, leaf: str, rule: Rule) -> _Parameter:
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            stage = next(at for at, held in enumerate(self._layers) if int(layer[2]) in held)
        else:
            stage = 0 if _FIRST_STAGE.search(name) else self._target.pp - 1
        item = self._items[leaf]
        return _Parameter(name, leaf, item, rule, stage, self._split(name, item, rule))

    def _heads(self, placed: Sequence[_Parameter], ties: Sequence[tuple[str, str, Rule]]) -> list[_Parameter]:
        """Tied parameters: the last stage has a copy of its own if another stage has the first."""
        last = self._target.pp - 1
        by_leaf = {parameter.leaf: parameter for parameter in placed}
        named = {name for name, _, _ in ties} | {parameter.name for parameter in placed}
        wanted = [(name, rule) for name, _, rule in ties]
        for rule in self.spec.rules:
            text = rule.match.text
            if rule.tied is not None and not rule.match.regular and not set("*?[") & set(text):
                wanted += [(text, rule)] if text not in named else []
        found: list[_Parameter] = []
        for name, rule in wanted:
            of = by_leaf.get(MODEL + rule.tied.to) if rule.tied is not None else None
            if of is not None and of.stage != last:
                found.append(replace(of, name=name, stage=last))
        return found

    def _split(self, name: str, item: Item, rule: Rule) -> tuple[LocalPlan, ...]:
        if isinstance(rule.layout, Flat):
            raise SpecError(f"parameter {name!r}: flat has no place in Megatron's files", names=[name])
        if isinstance(rule.layout, Unique) and self._target.tp > 1:
            raise SpecError(
                f"parameter {name!r}: rule {rule.match} ({rule}) gives it to one rank, but all ranks of "
                "Megatron have the same parameters: use replicated",
                names=[name],
            )
        plans = split(name, item.shape, rule, self._target)
        assert all(plan is not None for plan in plans)
        return tuple(plan for plan in plans if plan is not None)

    # --- the optimizer

    def _optimizer_states(self) -> dict[str, dict[str, Any]]:
        """By parameter, as we name it: items and values by the kind of state."""
        leaves = {parameter.leaf.removeprefix(MODEL) for parameter in self._parameters}
        states: dict[str, dict[str, Any]] = {}
        for name, item in self._items.items():
            if not name.startswith(OPTIMIZER):
                continue
            parameter, _, kind = name.removeprefix(OPTIMIZER).rpartition(".")
            if parameter not in leaves:
                raise UnsupportedState(
                    f"{name}: the model has no parameter {parameter!r}, so that this state has no place in "
                    "Megatron's files: select other leaves (--select 'model.*')"
                )
            states.setdefault(parameter, {})[kind] = item
        for name, value in self._values.items():
            # The tree of an optimizer has its state below a key of its own.
            parameter, _, kind = name.removeprefix(OPTIMIZER).removeprefix(_STATE).rpartition(".")
            if name.startswith(OPTIMIZER) and parameter in states and isinstance(value, (int, float)):
                states[parameter].setdefault(kind, value)
        return states

    def _groups(self) -> list[dict[str, Any]]:
        given = self._values.get(_GROUPS)
        groups = [group for group in given if isinstance(group, Mapping)] if isinstance(given, list) else []
        listed = {name for group in groups for name in group.get("params", ())}
        rest = [name for name in self._states if name not in listed]
        made = [dict(group) for group in groups]
        if rest:
            made.append({"params": rest})
        return made

    def _optimizer(self, mine: Sequence[_Parameter], rank: int) -> dict[str, object]:
        state: dict[int, dict[str, object]] = {}
        groups: list[dict[str, object]] = []
        masters: list[list[PendingTensor]] = []
        number = 0
        for group in self._groups():
            members = [one for one in mine if one.leaf.removeprefix(MODEL) in group.get("params", ())]
            kept = [self._states.get(one.leaf.removeprefix(MODEL), {}) for one in members]
            has_masters = bool(members) and all("fp32" in held for held in kept)
            masters.append([])
            indices = list(range(number, number + len(members)))
            number += len(members)
            for index, parameter, held in zip(indices, members, kept, strict=True):
                made = {kind: self._state(parameter, kind, value, rank) for kind, value in held.items()}
                master = made.pop("fp32") if has_masters else None
                if isinstance(master, PendingTensor):
                    masters[-1].append(master)
                if made:
                    state[index] = made
            options = {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
            groups.append({**options, "params": indices, NAMES: [one.name for one in members]})
        found: dict[str, object] = {"optimizer": {"state": state, "param_groups": groups}}
        if any(masters):
            found["fp32_from_fp16_params"] = masters
        return found

    def _state(self, parameter: _Parameter, kind: str, value: Any, rank: int) -> object:
        if not isinstance(value, Item):
            return value
        if value.shape == parameter.item.shape:
            return _pending(value, parameter.plans[rank])
        if all(plan.shape == value.shape for plan in parameter.plans):
            raise UnsupportedState(
                f"{value.name}: its shape {list(value.shape)} is that of one rank's piece of the parameter, "
                "so that a reader would take it for a piece"
            )
        rule = Rule(parameter.rule.match, Replicated())
        plan = split(parameter.name, value.shape, rule, self._target)[rank]
        assert plan is not None
        return _pending(value, plan)

    # --- values

    def _below(self, prefix: str) -> dict[str, object]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._values.items()
            if name.startswith(prefix) and _is_plain(value)
        }

    def _arguments(self) -> dict[str, object]:
        found = {
            **self._args,
            "tensor_model_parallel_size": self._target.tp,
            "pipeline_model_parallel_size": self._target.pp,
        }
        for parameter in self._parameters:
            if any(parameter.name.endswith(name) for name in _WORDS) and parameter.rule.pads:
                found["vocab_size"] = parameter.rule.pads[0].to
                found["padded_vocab_size"] = sum(plan.shape[0] for plan in parameter.plans)
        return found


def state_name(name: str, parameters: Collection[str]) -> str:
    """The name of an optimizer's leaf as we have it: by parameter, without the keys of a plain dict."""
    inside = name.removeprefix(OPTIMIZER + _STATE)
    if name.startswith(OPTIMIZER + _STATE) and MODEL + inside.rpartition(".")[0] in parameters:
        return OPTIMIZER + inside
    return name


def _pending(item: Item, plan: LocalPlan) -> PendingTensor:
    return PendingTensor(item.dtype, plan.shape, LeafBytes(item.stored, plan))


def _local_name(name: str, first: int) -> str:
    layer = _LAYER.fullmatch(name)
    return name if layer is None else f"{layer[1]}{int(layer[2]) - first}{layer[3]}"


def _nested(model: Mapping[str, PendingTensor]) -> dict[str, Any]:
    """As Megatron-LM nests: by module down to the encoder, dotted names below. Megatron-Core's are flat."""
    if not any(name.startswith("language_model.") for name in model):
        return dict(model)
    tree: dict[str, Any] = {}
    for name, tensor in model.items():
        depth = 2 if name.startswith("language_model.encoder.") else name.count(".")
        *path, last = name.split(".", depth)
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = tensor
    return tree


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)
