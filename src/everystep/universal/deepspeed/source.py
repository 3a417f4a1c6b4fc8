"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, with tensor, pipeline and expert parallelism.

Names, for a parameter ``p``:

- ``model.p``: the weight as it was trained with (for example BF16). ZeRO-3 stores only the FP32 master
  weight, so there ``model.p`` is that weight.
- ``optimizer.p.fp32``: the FP32 master weight. For ZeRO-3 it is an alias of ``model.p``: the bytes exist
  once.
- ``optimizer.p.<state>``: what the optimizer keeps, for example ``exp_avg`` and ``step``. A state that is no
  array of the group's length (the step) belongs to all parameters of its group, and each gets it.
- Buffers and frozen parameters are ``model.<name>``; tied parameters are aliases. Layers of a pipeline are
  named as `PipelineModule` does (``3.weight``, ``tied_modules.embed.weight``), experts by their number in the
  whole model.

Values: ``optimizer.param_groups`` (with names in place of numbers), ``lr_scheduler.*``, the counters, and the
client's own entries by their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from everystep.errors import CorruptCheckpoint, SpecError, UnsupportedSource
from everystep.universal.deepspeed.files import Folder, add_values, content_of, list_files, tag_folder
from everystep.universal.deepspeed.names import FP32, INFO, STEPS, VERSION, WANTED, ZERO
from everystep.universal.deepspeed.optimizer_files import ParameterState, read_zero
from everystep.universal.deepspeed.unsharded import read_unsharded
from everystep.universal.deepspeed.weights import read_weights
from everystep.universal.rules import Replicated, Rule, rule, unique
from everystep.universal.source import Source, SourceLeaf
from everystep.universal.spec import Assigned, Spec
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.leaves import leaf_of
from everystep.universal.torch_file.reading import StoredTensor
from everystep.universal.training_state import TrainingState, plain
from everystep.universal.union import union
from everystep.universal.whole_source import apply_spec, parameters_of

__all__ = ["KIND", "WANTED", "describe", "looks_like", "parameters"]

KIND = "deepspeed"
_REFUSED = "autotp_unsupported_parameter_patterns"
_WHOLE = rule("*", unique())


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found there, for messages; None if `describe` does not read it."""
    try:
        folder = tag_folder(os.path.abspath(path))
        files = list_files(folder)
    except (OSError, CorruptCheckpoint):
        return None
    tag = os.path.basename(folder)
    if files.layers and files.models:
        return f"a DeepSpeed pipeline checkpoint ({tag})"
    if files.optimizers:
        return f"a DeepSpeed ZeRO checkpoint ({tag})"
    # The universal layout has such files, too, and is read by another module.
    if files.models and not os.path.isdir(os.path.join(folder, ZERO)):
        return f"a DeepSpeed checkpoint without ZeRO ({tag})"
    return None


def parameters(path: str | os.PathLike[str]) -> list[str]:
    """The names that a spec is asked for."""
    checkpoint = _Checkpoint(os.path.abspath(path))
    if checkpoint.tensor_parallel > 1:
        return checkpoint.parameters()
    return parameters_of(checkpoint.describe(None))


def describe(
    path: str | os.PathLike[str], spec: Spec | None = None, as_training: bool | None = None
) -> Source:
    """The leaves and values of a checkpoint: the directory with ``latest``, or one of its tags.

    The ranks of tensor parallelism are joined by `spec`; without one, by the ``universal_checkpoint_info`` of
    the files. Where there is no tensor parallelism, parameters are whole, and a spec gives names and ties.
    """
    checkpoint = _Checkpoint(os.path.abspath(path))
    if checkpoint.tensor_parallel > 1:
        return checkpoint.describe(spec)
    found = checkpoint.describe(None)
    return found if spec is None else apply_spec(found, spec)


class _Checkpoint:
    """All that the files say. `describe` makes leaves of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = Folder(path)
        degrees = self._folder.degrees
        read = read_zero if self._folder.files.optimizers else read_unsharded
        self._optimizers = {mp: read(self._folder, mp) for mp in range(degrees.tensor * degrees.pipeline)}
        self._stage = self._common_stage()
        self._weights = read_weights(self._folder, self._optimizers)
        for mp, optimizer in self._optimizers.items():
            for name in optimizer.shapes:
                if name not in self._weights.held:
                    raise CorruptCheckpoint(
                        "the parameter is missing in the model file",
                        path=self._folder.model_file(mp),
                        leaf=name,
                    )

    @property
    def tensor_parallel(self) -> int:
        return self._folder.degrees.tensor

    def parameters(self) -> list[str]:
        """The names that rules are asked for."""
        return list(self._weights.held)

    def describe(self, spec: Spec | None) -> Source:
        """The checkpoint, joined by the rules of a spec; without one, by those that it has itself."""
        taken = self._assign(spec)
        made = TrainingState(self._path)
        names = {found.name: found.new_name for found in taken}
        for found in taken:
            if found.tied_to is None:
                held = self._weights.held[found.name]
                leaf = union(found.name, found.rule, held, leaf=f"model.{found.new_name}")
                made.model[found.new_name] = leaf
                self._add_states(found, made, leaf)
        for found in taken:
            if found.tied_to is not None:
                made.model[found.new_name] = made.model[found.tied_to]
        for name, other in self._weights.tied.items():
            if names.get(other, other) not in made.model:
                raise CorruptCheckpoint(
                    f"it is tied to {other!r}, which is missing",
                    path=self._folder.model_file(0),
                    leaf=str(name),
                )
            made.model[name] = made.model[names.get(other, other)]
        self._add_values(made, names)
        step = self._folder.model(0).get(STEPS)
        if type(step) is not int:
            raise UnsupportedSource(f"{self._folder.model_file(0)}: 'global_steps' is not a number")
        return source_of(self._path, KIND, made.tree(), step=step, facts=self._facts())

    # --- rules

    def _assign(self, spec: Spec | None) -> tuple[Assigned, ...]:
        names = self.parameters()
        if self.tensor_parallel == 1:
            return tuple(Assigned(name, name, _WHOLE, None) for name in names)
        if spec is not None:
            return spec.assign(names)
        info = self._folder.model(0).get(INFO)
        if not isinstance(info, Mapping):
            raise SpecError(
                f"{self._folder.path}: {self.tensor_parallel} tensor-parallel ranks wrote it, and the files "
                f"have no {INFO!r} that says how parameters are cut. Give a spec: --spec FILE, or "
                "spec=Spec([...]) in Python (docs/universal-spec.md)",
                names=names,
            )
        refused = [p for p in info.get(_REFUSED) or () if isinstance(p, str)]
        bad = [name for name in names if any(re.match(pattern, name) for pattern in refused)]
        if bad:
            raise UnsupportedSource(
                f"{self._folder.path}: DeepSpeed notes that {bad[0]!r} cannot be joined. Give a spec"
            )
        made = Spec.deepspeed(info)
        last = made.rules[-1]
        # The patterns are for parameters: of a buffer that none of them names, every rank has the same.
        return tuple(
            Assigned(found.name, found.new_name, Rule(last.match, Replicated()), None)
            if found.rule is last and found.name in self._weights.buffers
            else found
            for found in made.assign(names)
        )

    # --- the optimizer

    def _common_stage(self) -> int:
        stages = {optimizer.stage for optimizer in self._optimizers.values()}
        if len(stages) > 1:
            raise CorruptCheckpoint(
                f"the files of ranks have ZeRO stages {sorted(stages)}", path=self._folder.path
            )
        return stages.pop()

    def _states_of(self, name: str) -> list[list[ParameterState]]:
        """For each tensor-parallel rank, what its pipeline stages keep of a parameter."""
        degrees = self._folder.degrees
        found: list[list[ParameterState]] = []
        for tensor in range(degrees.tensor):
            ranks = (degrees.model_rank(stage, tensor) for stage in range(degrees.pipeline))
            states = (self._optimizers[mp].states.get(name) for mp in ranks)
            found.append([state for state in states if state is not None])
        return found

    def _add_states(self, found: Assigned, made: TrainingState, weight: SourceLeaf) -> None:
        states = self._states_of(found.name)
        every = [state for copies in states for state in copies]
        if not every:
            return
        place = f"optimizer.{found.new_name}"
        kept = made.states[found.new_name] = {}
        for key in dict.fromkeys(key for state in every for key in state.tensors):
            if key == FP32 and self._stage == 3:
                kept[key] = weight
                continue
            held: list[list[SourceLeaf]] = []
            for copies in states:
                held.append([])
                for state in copies:
                    if key not in state.tensors:
                        raise CorruptCheckpoint(
                            f"{key!r} is missing on some ranks", path=self._folder.path, leaf=found.name
                        )
                    held[-1].append(state.tensors[key])
            kept[key] = union(found.name, found.rule, held, leaf=f"{place}.{key}")
        first = every[0]
        for key, number in first.numbers.items():
            for state in every[1:]:
                self._require_same_number(number, state.numbers.get(key), key, found.name)
            kept[key] = leaf_of(f"{place}.{key}", number)  # of its own, though a group has one in common
        for key, value in first.values.items():
            if any(state.values.get(key) != value for state in every[1:]):
                raise self._mixed(key, found.name)
            kept[key] = plain(value, self._path)

    def _require_same_number(
        self, one: StoredTensor, other: StoredTensor | None, key: str, name: str
    ) -> None:
        if other is None or (one != other and content_of(one) != content_of(other)):
            raise self._mixed(key, name)

    def _mixed(self, key: str, name: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"ranks disagree about {key!r}: files of two steps are mixed", path=self._folder.path, leaf=name
        )

    # --- values

    def _add_values(self, made: TrainingState, names: Mapping[str, str]) -> None:
        counted = self._optimizers[0].counted
        if counted is None:
            self._add_groups(made, names)
        else:
            parts = plain(counted, self._path)
            made.states, made.groups = parts["state"], parts["param_groups"]
            made.optimizer = {k: v for k, v in parts.items() if k not in ("state", "param_groups")}
        add_values(made, self._folder.model(0), self._optimizers[0].content)

    def _add_groups(self, made: TrainingState, names: Mapping[str, str]) -> None:
        """The groups of the first tensor-parallel rank, with the parameters of all pipeline stages."""
        degrees = self._folder.degrees
        stages = [self._optimizers[degrees.model_rank(stage, 0)] for stage in range(degrees.pipeline)]
        groups: list[dict[str, object]] = []
        for number, group in enumerate(stages[0].groups):
            more = [one.groups[number].names for one in stages if number < len(one.groups)]
            listed = dict.fromkeys(names.get(name, name) for some in more for name in some)
            if listed or self._stage != 3:
                groups.append({**plain(group.options, self._path), "params": list(listed)})
            else:
                groups.append(plain(group.options, self._path))
        if groups:
            made.groups = groups

    def _facts(self) -> dict[str, str]:
        degrees, first = self._folder.degrees, self._optimizers[0]
        facts = {"zero stage": str(self._stage), "data parallel": str(degrees.data)}
        if degrees.tensor > 1:
            facts["tensor parallel"] = str(degrees.tensor)
        if degrees.pipeline > 1:
            facts["pipeline parallel"] = str(degrees.pipeline)
        if first.expert_degree > 1 or self._folder.files.experts:
            facts["expert parallel"] = str(first.expert_degree)
        version = self._folder.model(0).get(VERSION)
        if isinstance(version, str):
            facts["deepspeed"] = version
        return facts
