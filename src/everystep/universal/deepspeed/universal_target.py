"""DeepSpeed's universal layout, which it loads with ``"checkpoint": {"load_universal": true}``.

One layout serves ZeRO-1, 2 and 3 (of DeepSpeed 0.19; what older ones load into ZeRO-3 is written with
``--zero-stage 3``). What it needs, read off its loading code:

- ``zero/<parameter>/<state>.pt``: ``{"param": whole tensor, ...}`` for ``fp32`` and each of the optimizer's
  states; ZeRO-1 and 2 take all that are there, ZeRO-3 takes ``fp32``, ``exp_avg`` and ``exp_avg_sq``.
  ``step.pt`` is a number, for ZeRO-1 and 2.
- ``zero/optimizer_state.pt``: ``param_groups`` and ``ds_version`` for ZeRO-1 and 2; for ZeRO-3
  ``optimizer_state_dict`` with the same groups, and the step in ``state[0]``.
- ``mp_rank_XX_model_states.pt``: counters, scheduler, the client's state. For ZeRO-3 it looks for the same
  with ``zero_pp_rank_0_`` before its name. It does not load the weights in them.
- ``latest_universal``: the directory, relative to this one. Here it is this one.

ZeRO-3 does not pad a vocabulary when it loads one, and would shift all that follows without a word. So where
a rule says that one is padded, there are no model files for ZeRO-3, and loading fails there.

A parameter without moments beside others that have some gets zeros: that is what ZeRO keeps for it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.engine import fs
from everystep.errors import SpecError
from everystep.universal.atomic_output import output_directory, refuse_directory
from everystep.universal.deepspeed.names import (
    BUFFERS,
    CONFIG,
    DATA_RANKS,
    DEGREES,
    DYNAMIC_LOSS_SCALER,
    FP32,
    FROZEN_PIECES,
    FROZEN_SHAPES,
    GLOBAL_STATE,
    INFO,
    LATEST_UNIVERSAL,
    LOSS_SCALER,
    MODULE,
    OPTIMIZER_DICT,
    OPTIMIZER_STATE,
    PARAM_SHAPES,
    SCHEDULER,
    SHARED,
    STEP,
    VERSION,
    ZERO,
    model_file,
)
from everystep.universal.deepspeed.parameter_fields import CAT_DIM, PARAM, fields_of_rule
from everystep.universal.deepspeed.universal_training import training_of
from everystep.universal.items import Job, OutputFile, progress_of
from everystep.universal.presets import deepspeed_rules
from everystep.universal.readback import compare_with
from everystep.universal.rules import Rule, replicated, rule
from everystep.universal.split import LocalPlan, split
from everystep.universal.torch_file.pickle_writer import Instance, PendingTensor, Size
from everystep.universal.torch_file.writing import (
    LeafBytes,
    TorchFile,
    leaf_tensor,
    write_files,
)

KIND = "ds-universal"
_HERE = b"."
_VERSION = "0.19.8"
"""The version of DeepSpeed whose layout this is. It refuses files without a version."""


def plan(job: Job) -> list[OutputFile]:
    refuse_directory(job.path)
    files = [OutputFile(file.name, file.nbytes) for file in _Layout(job).files()]
    return [*files, OutputFile(LATEST_UNIVERSAL, len(_HERE))]


def write(job: Job) -> None:
    files = _Layout(job).files()
    with output_directory(job.path) as directory:
        write_files(job.checkpoint, directory, files, progress_of(job, sum(f.data_nbytes for f in files)))
        with fs.write_file(os.path.join(directory, LATEST_UNIVERSAL), _HERE) as file:
            fs.sync([file])
        if job.verify:
            check(job, directory)


def check(job: Job, path: str) -> None:
    training = training_of(job)
    left_out = {f"model.{name}" for name in training.trained if job.zero_stage == 3}
    named = tuple(
        replace(item, name=training.places[item.name])
        for item in job.items
        if item.name not in left_out or item.name.removeprefix("model.") in training.own_masters
    )
    compare_with(replace(job, items=named), path, KIND)


class _Layout:
    """The files of one conversion."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._checkpoint = job.checkpoint
        self._training = training_of(job)
        self._tp, self._pp = job.layout.tp, job.layout.pp
        self._stage = job.zero_stage
        self._info = self._training.deepspeed.get(INFO)
        self._buffers = self._find_buffers()
        self._rules = self._find_rules()
        self._padded = self._pads_vocabulary()
        if self._padded and self._stage == 3:
            raise SpecError(
                "the vocabulary is padded over tensor-parallel ranks, and ZeRO-3 cannot load that: "
                "use stage 1 or 2"
            )

    def files(self) -> list[TorchFile]:
        files = self._model_files()
        files += [file for name in self._training.trained for file in self._parameter_files(name)]
        return [*files, TorchFile(f"{ZERO}/{OPTIMIZER_STATE}", self._optimizer_state())]

    def _find_buffers(self) -> list[str]:
        """The source's list; without one, all tensors that the optimizer does not update."""
        training = self._training
        known = training.deepspeed.get(BUFFERS)
        if isinstance(known, list):
            return known
        return [
            name
            for name, value in training.model.items()
            if name not in training.trained
            and name not in training.shared
            and isinstance(value, PendingTensor)
        ]

    def _pads_vocabulary(self) -> bool:
        info = self._info if isinstance(self._info, dict) else {}
        known = info.get("padded_vocab_size"), info.get("original_vocab_size")
        if known[0] is not None and known[0] == known[1]:
            return False
        return any(name in self._rules and self._rules[name].pads for name in self._training.trained)

    # --- how parameters are cut

    def _find_rules(self) -> dict[str, Rule]:
        known = list(self._job.spec.rules) if self._job.spec is not None else []
        default: Rule | None = None
        if isinstance(self._info, dict):
            known += deepspeed_rules(self._info)
            default = known[-1]
        found: dict[str, Rule] = {}
        missing: list[str] = []
        for name, value in self._training.model.items():
            match = next((one for one in known if one.match.matches(name)), None)
            if match is not None and match is default and name in self._buffers:
                match = None  # the patterns are for parameters: every rank has the same
            if match is not None:
                found[name] = match
            elif name in self._training.trained:
                missing.append(name)
            elif isinstance(value, PendingTensor):
                found[name] = rule("*", replicated())
        if missing and self._tp > 1:
            shown = ", ".join(map(repr, missing[:20]))
            raise SpecError(
                f"no rule says how {self._tp} tensor-parallel ranks cut {shown}: pass a spec", names=missing
            )
        return found

    def _fields(self, name: str, shape: tuple[int, ...]) -> dict[str, object]:
        if name not in self._rules:
            return {CAT_DIM: 0}
        return fields_of_rule(name, shape, self._rules[name])

    def _plans(self, name: str, shape: tuple[int, ...]) -> tuple[LocalPlan | None, ...]:
        """For each tensor-parallel rank what it holds; None for all of a parameter."""
        if self._tp == 1:
            return (None,)
        return split(name, shape, self._rules[name], self._job.layout)

    # --- zero/

    def _parameter_files(self, name: str) -> list[TorchFile]:
        training, checkpoint = self._training, self._checkpoint
        master = training.masters[name]
        flat = self._stage == 3 and self._tp == 1
        fields = {} if flat else self._fields(name, master.shape)
        found = {FP32: leaf_tensor(checkpoint, master.origin.stored, "F32")}
        for key in training.state_keys:
            state = training.states[name].get(key)
            found[key] = state if state is not None else PendingTensor("F32", master.shape)
        files = []
        for key, tensor in found.items():
            content: object = {PARAM: tensor, **fields}
            if flat:
                content = replace(tensor, shape=(tensor.count,))
            files.append(TorchFile(f"{ZERO}/{name}/{key}.pt", content))
        step = training.steps.get(name, training.step)
        if step is not None and not flat:
            files.append(TorchFile(f"{ZERO}/{name}/{STEP}.pt", step))
        return files

    def _optimizer_state(self) -> dict[str, object]:
        training = self._training
        known = {key: training.deepspeed[key] for key in GLOBAL_STATE if key in training.deepspeed}
        scaler = known.get("loss_scaler")
        if isinstance(scaler, dict):
            dynamic = "scale_factor" in scaler
            known["loss_scaler"] = Instance(DYNAMIC_LOSS_SCALER if dynamic else LOSS_SCALER, scaler)
        # Both forms: ZeRO-1 and 2 read the first, ZeRO-3 the second.
        of_stage3 = {"state": {0: {STEP: training.step}}, "param_groups": training.groups}
        return {
            **known,
            VERSION: _VERSION,
            "param_groups": training.groups,
            OPTIMIZER_DICT: of_stage3,
        }

    # --- the model's files

    def _model_files(self) -> list[TorchFile]:
        files: list[TorchFile] = []
        for stage in range(self._pp):
            modules = self._modules(stage)
            for rank in range(self._tp):
                number = stage * self._tp + rank
                content = self._model_state(stage, rank)
                if self._stage != 3:
                    whole = {**content, MODULE: modules[rank]}
                    files.append(TorchFile(model_file(number), whole))
                if self._stage in (None, 3) and not self._padded:
                    empty = self._emptied(modules[rank] if self._stage == 3 else {})
                    files.append(TorchFile(model_file(number, zero3=True), {**content, MODULE: empty}))
        return files

    def _model_state(self, stage: int, rank: int) -> dict[str, object]:
        training = self._training
        shapes = [
            OrderedDict((name, Size(self._local_shape(name, rank))) for name in (group if stage == 0 else ()))
            for group in training.param_shapes
        ]
        state: dict[str, object] = {
            MODULE: None,
            BUFFERS: self._buffers if stage == 0 else [],
            "optimizer": None,
            PARAM_SHAPES: shapes,
            FROZEN_SHAPES: None,
            SHARED: dict(training.shared) if stage == 0 else {},
            FROZEN_PIECES: None,
            SCHEDULER: training.lr_scheduler,
            "data_sampler": None,
            "random_ltd": None,
            **training.counters,
            DATA_RANKS: 1,
            "mp_world_size": self._tp * self._pp,
            DEGREES: {"pp_degree": self._pp, "tp_degree": self._tp},
            CONFIG: {},
            VERSION: _VERSION,
        }
        if isinstance(self._info, dict):
            state[INFO] = self._info
        return {**state, **training.client}

    def _local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._training.masters[name].shape
        local = self._plans(name, shape)[rank]
        return shape if local is None else local.shape

    def _modules(self, stage: int) -> list[OrderedDict[str, Any]]:
        """The model of each tensor-parallel rank. All of it is with the first stage.

        DeepSpeed takes every parameter from ``zero/``, also those of its other stages.
        """
        modules: list[OrderedDict[str, Any]] = [OrderedDict() for _ in range(self._tp)]
        if stage > 0:
            return modules
        training = self._training
        made: dict[int, list[PendingTensor]] = {}
        for name, value in training.model.items():
            if not isinstance(value, PendingTensor):
                for module in modules:
                    module[name] = value
                continue
            first = training.shared.get(name, name)
            if id(value) not in made:
                made[id(value)] = self._cut(first, value)
            for module, local in zip(modules, made[id(value)], strict=True):
                module[name] = local
        return modules

    def _cut(self, name: str, tensor: PendingTensor) -> list[PendingTensor]:
        """What each rank has of an entry. If there is only the FP32 weight, nothing, as in ZeRO-3."""
        training = self._training
        if name in training.trained and training.masters[name] is tensor and name in training.own_masters:
            return [PendingTensor(tensor.dtype, (0,))] * self._tp
        origin: LeafBytes = tensor.origin
        return [
            tensor if local is None and self._tp == 1 else self._local(tensor, origin, local)
            for local in self._plans(name, tensor.shape)
        ]

    def _local(self, tensor: PendingTensor, origin: LeafBytes, local: LocalPlan | None) -> PendingTensor:
        if local is None:
            return PendingTensor(tensor.dtype, (0,))
        return leaf_tensor(self._checkpoint, origin.stored, tensor.dtype, local)

    def _emptied(self, module: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """As ZeRO-3 has it: trained parameters are empty."""
        trained, shared = self._training.trained, self._training.shared
        return OrderedDict(
            (
                name,
                PendingTensor(value.dtype, (0,))
                if isinstance(value, PendingTensor) and shared.get(name, name) in trained
                else value,
            )
            for name, value in module.items()
        )
