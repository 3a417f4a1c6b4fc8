"""Files of `torch.save`: state dicts, training states of them, Lightning checkpoints; Trainer directories.

Names: a bare state dict is a model, ``model.<parameter>``. In a dictionary of several, each tensor is named
by its place, where the usual words for the model and the optimizer (``model_state_dict``,
``optimizer_state_dict``, ...) become ``model`` and ``optimizer``. An optimizer's state is
``optimizer.<parameter>.<state>`` where the file tells which parameter is which (`optimizer_names`), else
``optimizer.<number>.<state>``. What is not a tensor becomes a value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from holdfast.universal.optimizer_names import collect_optimizer, is_optimizer_state
from holdfast.universal.safetensors_file import read_safetensors_file
from holdfast.universal.source import Source
from holdfast.universal.torch_file import StoredTensor, is_torch_file, read_torch_file
from holdfast.universal.trees import Collected, step_of

KIND = "torch"
_MODEL_WORDS = ("model", "model_state_dict", "state_dict", "module", "net")
_OPTIMIZER_WORDS = ("optimizer", "optimizer_state_dict", "optim", "opt")
_STEP_WORDS = ("global_step", "global_steps", "step", "steps", "iteration", "iter")
_TRAINER_STATE = "trainer_state.json"
_MAX_JSON_NBYTES = 256 << 20
# The classes of Lightning whose objects its files hold, and of a Trainer's arguments.
_ALLOWED = frozenset(
    {
        "pytorch_lightning.utilities.parsing.AttributeDict",
        "lightning_fabric.utilities.data.AttributeDict",
        "lightning.fabric.utilities.data.AttributeDict",
        "lightning.pytorch.utilities.parsing.AttributeDict",
    }
)


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found, or None if this is nothing that `describe` reads."""
    path = os.fspath(path)
    if os.path.isfile(os.path.join(path, _TRAINER_STATE)):
        return f"a Hugging Face Trainer checkpoint ({_TRAINER_STATE})"
    if os.path.isfile(path) and is_torch_file(path):
        return "a file of torch.save"
    return None


def describe(path: str | os.PathLike[str], spec: object = None) -> Source:
    """The leaves and values of a file of `torch.save`, or of a Trainer's directory."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return _describe_trainer(path)
    tree = read_torch_file(path, _ALLOWED)
    into = Collected(path)
    facts = {"format": "torch.save"}
    if isinstance(tree, dict) and _is_lightning(tree):
        facts["format"] = "Lightning"
        version = tree.get("pytorch-lightning_version")
        if isinstance(version, str):
            facts["lightning"] = version
        _collect_lightning(into, tree)
    else:
        _collect_any(into, tree)
    return _source(path, into, facts)


def _source(path: str, into: Collected, facts: Mapping[str, str]) -> Source:
    leaves, aliases = into.leaves()
    return Source(
        path=path,
        kind=KIND,
        step=step_of(into.values, _STEP_WORDS),
        leaves=leaves,
        values=into.values,
        aliases=aliases,
        facts=dict(facts),
    )


def _is_state_dict(tree: object) -> bool:
    """Whether this is a model's state dict: names and tensors, at least half of the entries."""
    if not isinstance(tree, dict) or not tree or not all(isinstance(key, str) for key in tree):
        return False
    return 2 * sum(isinstance(value, StoredTensor) for value in tree.values()) >= len(tree)


def _collect_any(into: Collected, tree: object) -> None:
    if is_optimizer_state(tree):
        assert isinstance(tree, dict)
        collect_optimizer(into, tree, "optimizer", {})
    elif not isinstance(tree, dict) or not all(isinstance(key, (str, int)) for key in tree):
        into.add(tree)
    elif _is_state_dict(tree):
        into.add(tree, "model")
    else:
        _collect_training_state(into, tree)


def _collect_training_state(into: Collected, tree: Mapping[Any, Any]) -> None:
    model_key = _model_key(tree)
    model = _tensors_of(tree[model_key]) if model_key is not None else {}
    optimizers = [key for key, value in tree.items() if is_optimizer_state(value)]
    for key, value in tree.items():
        if key in optimizers:
            renamed = "optimizer" not in tree and len(optimizers) == 1 and key in _OPTIMIZER_WORDS
            collect_optimizer(into, value, "optimizer" if renamed else str(key), model)
        elif key == model_key and key in _MODEL_WORDS and "model" not in tree:
            into.add(value, "model")
        else:
            into.add(value, str(key))


def _model_key(tree: Mapping[Any, Any]) -> Any:
    """The entry that holds the model: one of the usual words, or the only state dict there is."""
    for word in _MODEL_WORDS:
        if _is_state_dict(tree.get(word)):
            return word
    found = [key for key, value in tree.items() if _is_state_dict(value)]
    return found[0] if len(found) == 1 else None


def _tensors_of(tree: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {name: value for name, value in tree.items() if isinstance(value, StoredTensor)}


def _is_lightning(tree: Mapping[Any, Any]) -> bool:
    return isinstance(tree.get("state_dict"), dict) and (
        "pytorch-lightning_version" in tree or "optimizer_states" in tree
    )


def _collect_lightning(into: Collected, tree: Mapping[Any, Any]) -> None:
    model = _tensors_of(tree["state_dict"])
    into.add(tree["state_dict"], "model")
    optimizers = tree.get("optimizer_states")
    states = optimizers if isinstance(optimizers, list) else []
    for index, state in enumerate(states):
        place = "optimizer" if len(states) == 1 else f"optimizer.{index}"
        if is_optimizer_state(state):
            collect_optimizer(into, state, place, model)
        else:
            into.add(state, place)
    for key, value in tree.items():
        if key not in ("state_dict", "optimizer_states"):
            into.add(value, str(key))


# --- directories of the Trainer


def _describe_trainer(path: str) -> Source:
    into = Collected(path)
    state = _read_json(os.path.join(path, _TRAINER_STATE))
    model = _trainer_model(path)
    # safetensors files and indexes sort the names, so they do not tell the order of the model's parameters.
    order = model if all(tensor.file.endswith("pytorch_model.bin") for tensor in model.values()) else {}
    for name, tensor in model.items():
        into.add_tensor(f"model.{name}", tensor)
    optimizer = os.path.join(path, "optimizer.pt")
    if os.path.exists(optimizer):
        tree = read_torch_file(optimizer)
        if not is_optimizer_state(tree):
            raise UnsupportedSource(f"{optimizer}: this is not the state of a torch optimizer")
        collect_optimizer(into, tree, "optimizer", order)
    for file, place in (("scheduler.pt", "lr_scheduler"), ("scaler.pt", "scaler")):
        where = os.path.join(path, file)
        if os.path.exists(where):
            into.add(read_torch_file(where), place)
    if not isinstance(state, dict):
        raise CorruptCheckpoint("the file is not a JSON object", path=os.path.join(path, _TRAINER_STATE))
    for key, value in state.items():
        if key in ("global_step", "epoch"):
            into.add_value(key, value)
        else:
            into.add_value(f"trainer.{key}", value)
    return _source(path, into, {"format": "Hugging Face Trainer"})


def _trainer_model(path: str) -> dict[str, StoredTensor]:
    """The tensors of the model's file or files."""
    for single in ("model.safetensors", "adapter_model.safetensors"):
        if os.path.exists(os.path.join(path, single)):
            return read_safetensors_file(os.path.join(path, single))
    for single in ("pytorch_model.bin", "adapter_model.bin"):
        if os.path.exists(os.path.join(path, single)):
            return _tensors_of(read_torch_file(os.path.join(path, single)))
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        where = os.path.join(path, index)
        if os.path.exists(where):
            return _sharded_model(path, where)
    raise IncompleteCheckpoint(
        "the directory has no model.safetensors, pytorch_model.bin or index of several of them", path=path
    )


def _sharded_model(path: str, index: str) -> dict[str, StoredTensor]:
    content = _read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CorruptCheckpoint("the index has no weight_map", path=index)
    files: dict[str, dict[str, StoredTensor]] = {}
    found: dict[str, StoredTensor] = {}
    for name, file in places.items():
        if file != os.path.basename(file) or file in (".", ".."):
            raise CorruptCheckpoint(f"the index names a file outside of the directory: {file!r}", path=index)
        if file not in files:
            where = os.path.join(path, file)
            files[file] = (
                read_safetensors_file(where)
                if file.endswith(".safetensors")
                else _tensors_of(read_torch_file(where))
            )
        if name not in files[file]:
            raise CorruptCheckpoint(
                f"the index says that the tensor is in {file}, but it is not", path=index, leaf=name
            )
        found[name] = files[file][name]
    return found


def _read_json(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_JSON_NBYTES + 1)
    except FileNotFoundError:
        raise IncompleteCheckpoint("the file is missing", path=path) from None
    if len(data) > _MAX_JSON_NBYTES:
        raise UnsupportedSource(f"{path}: more than {_MAX_JSON_NBYTES} bytes of JSON")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"the file is not JSON: {error}", path=path) from error
