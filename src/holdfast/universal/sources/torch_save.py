"""Files of `torch.save`: state dicts, training states of them, Lightning checkpoints; Trainer directories.

Names: a bare state dict is a model, ``model.<parameter>``. In a dictionary of several, each tensor is named
by its place, where the usual words for the model and the optimizer (``model_state_dict``,
``optimizer_state_dict``, ...) become ``model`` and ``optimizer``. An optimizer's state is
``optimizer.<parameter>.<state>`` where the file tells which parameter is which (`optimizer_names`), else
``optimizer.<number>.<state>``. What is not a tensor becomes a value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.universal.optimizer_names import collect_optimizer, is_optimizer_state
from holdfast.universal.source import Source
from holdfast.universal.sources.trainer import TRAINER_STATE, collect_trainer
from holdfast.universal.torch_file import StoredTensor, is_torch_file, read_torch_file
from holdfast.universal.trees import Collected, step_of

KIND = "torch"
WANTED = "a file of torch.save, or a directory with trainer_state.json"
_MODEL_WORDS = ("model", "model_state_dict", "state_dict", "module", "net")
_OPTIMIZER_WORDS = ("optimizer", "optimizer_state_dict", "optim", "opt")
_STEP_WORDS = ("global_step", "global_steps", "step", "steps", "iteration", "iter")
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
    if os.path.isfile(os.path.join(path, TRAINER_STATE)):
        return f"a Hugging Face Trainer checkpoint ({TRAINER_STATE})"
    if os.path.isfile(path) and is_torch_file(path):
        return "a file of torch.save"
    return None


def describe(path: str | os.PathLike[str], spec: object = None) -> Source:
    """The leaves and values of a file of `torch.save`, or of a Trainer's directory."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        into = Collected(path)
        facts, carried = collect_trainer(path, into)
        return replace(_source(path, into, facts), carried=carried)
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
