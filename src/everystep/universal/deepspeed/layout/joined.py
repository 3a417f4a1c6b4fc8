"""From the model-parallel ranks of a checkpoint to whole leaves, by the rules of a spec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from everystep.errors import CorruptCheckpoint, SpecError, UnsupportedSource
from everystep.format import dtypes
from everystep.universal.deepspeed.layout.files import Folder, content_of
from everystep.universal.deepspeed.layout.optimizer_files import Held, State, read_zero
from everystep.universal.deepspeed.layout.unsharded import read_unsharded
from everystep.universal.deepspeed.layout.weights import read_weights
from everystep.universal.rules import Replicated, Rule, rule, unique
from everystep.universal.source import Source, SourceLeaf, flat_fragments
from everystep.universal.spec import Assigned, Spec
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.leaves import leaf_of
from everystep.universal.torch_file.reading import StoredTensor
from everystep.universal.training_state import TrainingState, plain
from everystep.universal.union import union

KIND = "deepspeed"
_INFO = "universal_checkpoint_info"
_REFUSED = "autotp_unsupported_parameter_patterns"
# What DeepSpeed itself puts into a model file; everything else is the client's.
OWN_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
    ]
)
_WHOLE = rule("*", unique())


class Checkpoint:
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
                leaf = self._join(found, f"model.{found.new_name}", self._weights.held[found.name])
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
        step = self._folder.model(0).get("global_steps")
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
        info = self._folder.model(0).get(_INFO)
        if not isinstance(info, Mapping):
            raise SpecError(
                f"{self._folder.path}: {self.tensor_parallel} tensor-parallel ranks wrote it, and the files "
                f"have no {_INFO!r} that says how parameters are cut. Give a spec: --spec FILE, or "
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

    def _join(self, found: Assigned, leaf: str, held: Sequence[Sequence[Held]]) -> SourceLeaf:
        kinds = {one.dtype for copies in held for one in copies}
        if len(kinds) > 1:
            raise CorruptCheckpoint(
                f"ranks have {leaf!r} in types {sorted(kinds)}", path=self._folder.path, leaf=found.name
            )
        if found.rule is _WHOLE:
            return self._whole(found, leaf, held[0])
        tensors = [[one.local for one in copies] for copies in held]
        return union(found.name, kinds.pop(), found.rule, tensors, leaf=leaf)

    def _whole(self, found: Assigned, leaf: str, copies: Sequence[Held]) -> SourceLeaf:
        """What `union` gives for a parameter that is not cut, without its arithmetic of boxes."""
        dtype, shape = copies[0].dtype, copies[0].local.shape
        if any(one.local.shape != shape for one in copies):
            raise CorruptCheckpoint(
                f"pipeline stages have {leaf!r} in different shapes", path=self._folder.path, leaf=found.name
            )
        size = dtypes.itemsize(dtype)
        versions = [
            tuple(
                fragment
                for extent in one.local.extents
                for fragment in flat_fragments(
                    extent.file, extent.offset, extent.start, extent.stop, shape, size
                )
            )
            for one in copies
        ]
        return SourceLeaf(leaf, dtype, shape, versions[0], copies=tuple(versions[1:]))

    # --- the optimizer

    def _common_stage(self) -> int:
        stages = {optimizer.stage for optimizer in self._optimizers.values()}
        if len(stages) > 1:
            raise CorruptCheckpoint(
                f"the files of ranks have ZeRO stages {sorted(stages)}", path=self._folder.path
            )
        return stages.pop()

    def _states_of(self, name: str) -> list[list[State]]:
        """For each tensor-parallel rank, what its pipeline stages keep of a parameter."""
        degrees = self._folder.degrees
        found: list[list[State]] = []
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
            if key == "fp32" and self._stage == 3:
                kept[key] = weight
                continue
            held: list[list[Held]] = []
            for copies in states:
                held.append([])
                for state in copies:
                    if key not in state.tensors:
                        raise CorruptCheckpoint(
                            f"{key!r} is missing on some ranks", path=self._folder.path, leaf=found.name
                        )
                    held[-1].append(state.tensors[key])
            kept[key] = self._join(found, f"{place}.{key}", held)
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
        model, first = self._folder.model(0), self._optimizers[0]
        for key, value in model.items():
            if key not in OWN_KEYS:
                made.rest[key] = plain(value, self._path)
        for key in ("global_steps", "global_samples", "skipped_steps"):
            if type(model.get(key)) is int:
                made.rest[key] = model[key]
        if model.get("lr_scheduler") is not None:
            made.rest["lr_scheduler"] = plain(model["lr_scheduler"], self._path)
        own = {key: plain(value, self._path) for key, value in first.scaling.items()}
        if isinstance(model.get(_INFO), dict):
            own[_INFO] = plain(model[_INFO], self._path)
        if isinstance(model.get("buffer_names"), list):
            own["buffer_names"] = model["buffer_names"]
        if own:
            made.rest["deepspeed"] = own

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
        version = self._folder.model(0).get("ds_version")
        if isinstance(version, str):
            facts["deepspeed"] = version
        return facts
