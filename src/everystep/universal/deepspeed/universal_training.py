"""What DeepSpeed calls the parts of a training state: model, master weights, optimizer states, client state.

Out of a conversion's tree: ``model``, ``optimizer`` (``state`` by parameter, ``param_groups``), and what else
there is. Each tensor is a `PendingTensor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everystep.errors import UnsupportedState
from everystep.store.stream.element_casts import FLOATS
from everystep.universal.deepspeed.names import COUNTERS, FP32, OWN_KEYS, SCHEDULER, STEP, STEPS
from everystep.universal.items import Job
from everystep.universal.torch_file.pickle_writer import PendingTensor
from everystep.universal.torch_file.writing import pending_state


@dataclass(slots=True)
class UniversalTraining:
    """A training state in DeepSpeed's terms.

    `trained` are the parameters that the optimizer updates, `masters` their FP32 weights (or what these are
    cast from), `own_masters` those that have no other weight than this. `states` are the optimizer's arrays
    by parameter and key, `state_keys` all keys; `steps` and `step` its counts. `shared` are tied names.
    `places` is, for each item, its name when the result is read.
    """

    model: dict[str, Any]
    trained: dict[str, None] = field(default_factory=dict)
    masters: dict[str, PendingTensor] = field(default_factory=dict)
    own_masters: set[str] = field(default_factory=set)
    states: dict[str, dict[str, PendingTensor]] = field(default_factory=dict)
    state_keys: dict[str, None] = field(default_factory=dict)
    steps: dict[str, object] = field(default_factory=dict)
    step: object = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    param_shapes: list[list[str]] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    lr_scheduler: object = None
    counters: dict[str, int] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def training_of(job: Job) -> UniversalTraining:
    """The parts of a conversion's state. `UnsupportedState` if DeepSpeed's layout has no place for one."""
    state, tensors = pending_state(job)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UnsupportedState(
            "DeepSpeed's universal layout needs the weights of a model, as leaves model.<name>"
        )
    rest = {str(key): value for key, value in state.items()}
    training = UniversalTraining(_flat(rest.pop("model")))
    optimizer = rest.pop("optimizer", None)
    if optimizer is not None:
        _add_optimizer(training, optimizer)
    _find_trained(training)
    _add_masters(training)
    deepspeed = rest.pop("deepspeed", None)
    training.deepspeed = deepspeed if isinstance(deepspeed, dict) else {}
    training.lr_scheduler = rest.pop(SCHEDULER, None)
    counted = {key: rest.pop(key, None) for key in COUNTERS}
    training.counters = {key: value if type(value) is int else 0 for key, value in counted.items()}
    training.counters[STEPS] = training.counters[STEPS] or job.checkpoint.step
    for key in rest:
        if key in OWN_KEYS:
            raise UnsupportedState(f"{key!r} is a name of DeepSpeed's own in such files: rename it")
    training.client = rest
    training.places = _places(job, training, tensors)
    return training


def _flat(model: Mapping[Any, Any], place: str = "") -> dict[str, Any]:
    """A state dict with dotted names."""
    found: dict[str, Any] = {}
    for key, value in model.items():
        name = f"{place}{key}"
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def _add_optimizer(training: UniversalTraining, optimizer: object) -> None:
    state = optimizer.get("state") if isinstance(optimizer, dict) else None
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise UnsupportedState(
            "the state of the optimizer is not by parameter: DeepSpeed's universal layout has no place for it"
        )
    training.groups = [dict(group) for group in groups]
    for name, entries in state.items():
        if not isinstance(entries, dict) or name not in training.model:
            raise UnsupportedState(f"optimizer.{name}: the model has no parameter of this name")
        training.states[name] = {}
        for key, value in entries.items():
            _add_state(training, name, str(key), value)


def _add_state(training: UniversalTraining, name: str, key: str, value: object) -> None:
    weight = training.model[name]
    if key == STEP:
        training.steps[name] = value
        training.step = value if training.step is None else training.step
    elif key == FP32 and isinstance(value, PendingTensor):
        training.masters[name] = value
        if value is weight:
            training.own_masters.add(name)
    elif isinstance(value, PendingTensor) and value.shape == weight.shape:
        _require_file_name(key)
        training.states[name][key] = value
        training.state_keys.setdefault(key)
    elif value is not None:
        raise UnsupportedState(
            f"optimizer.{name}.{key}: DeepSpeed's universal layout has no place for state that is not of the "
            "parameter's shape"
        )


def _find_trained(training: UniversalTraining) -> None:
    """Those in the optimizer's groups; else those with state; else all of the model's own floating point."""
    first: dict[int, str] = {}
    for name, value in training.model.items():
        if isinstance(value, PendingTensor):
            owner = first.setdefault(id(value), name)
            if owner != name:
                training.shared[name] = owner
    grouped = [
        [name for name in group.get("params", ()) if isinstance(name, str) and name in training.model]
        for group in training.groups
    ]
    listed = [name for names in grouped for name in names]
    stateful = [name for name in training.states if name not in listed]
    if listed:
        training.param_shapes = [*grouped, stateful] if stateful else grouped
    elif stateful:
        training.param_shapes = [stateful]
    else:
        training.param_shapes = [
            [
                name
                for name, value in training.model.items()
                if isinstance(value, PendingTensor) and value.dtype in FLOATS and name not in training.shared
            ]
        ]
    training.trained = dict.fromkeys(name for names in training.param_shapes for name in names)
    for name in training.trained:
        _require_file_name(name)


def _add_masters(training: UniversalTraining) -> None:
    for name in training.trained:
        weight = training.model[name]
        if not isinstance(weight, PendingTensor) or weight.dtype not in FLOATS:
            raise UnsupportedState(f"model.{name}: the optimizer updates it, but it is no array of floats")
        training.masters.setdefault(name, weight)
        training.states.setdefault(name, {})
        # A tied name may come before the one that the optimizer knows.
        owner = training.shared.pop(name, None)
        if owner is not None:
            training.shared[owner] = name


def _places(job: Job, training: UniversalTraining, tensors: Mapping[str, PendingTensor]) -> dict[str, str]:
    """The name of each item when the result is read. Leaves of one rank lose the rank's prefix."""
    client: dict[int, str] = {}
    _walk(training.client, "", client)
    _walk({SCHEDULER: training.lr_scheduler}, "", client)
    return {item.name: client.get(id(tensors[item.name]), item.name) for item in job.items}


def _walk(value: object, place: str, found: dict[int, str]) -> None:
    if isinstance(value, PendingTensor):
        found.setdefault(id(value), place)
    entries: list[tuple[object, object]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)):
        entries = list(enumerate(value))
    for key, inside in entries:
        _walk(inside, f"{place}.{key}" if place else str(key), found)


def _require_file_name(name: str) -> None:
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(name.encode()) > 240:
        raise UnsupportedState(f"{name[:80]!r} cannot be the name of a file, as DeepSpeed's layout needs it")
