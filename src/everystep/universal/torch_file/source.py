"""Files of `torch.save`: state dicts, training states of them, Lightning checkpoints; Trainer directories.

A file gives what `torch.load` gives. Arranged as a training state, a bare state dict is ``model``; in a
dictionary of several, the usual words for the model and the optimizer (``model_state_dict``,
``optimizer_state_dict``, ...) become ``model`` and ``optimizer``. An optimizer's state is by the names of
parameters where the file proves which is which (`optimizer_names`), else by number. The files of Lightning
and the directories of a Trainer are training states, so they are arranged unless something else is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from everystep.universal.hf.trainer import TRAINER_STATE, read_trainer
from everystep.universal.optimizer_names import is_optimizer_state, optimizer_state
from everystep.universal.source import Source
from everystep.universal.state_tree import source_of, step_in
from everystep.universal.torch_file.pickle_machine import InertObject
from everystep.universal.torch_file.reading import StoredTensor, is_torch_file, read_torch_file

KIND = "torch"
WANTED = "a file of torch.save, or a directory with trainer_state.json"
_MODEL_WORDS = ("model", "model_state_dict", "state_dict", "module", "net")
_OPTIMIZER_WORDS = ("optimizer", "optimizer_state_dict", "optim", "opt")
_STEPS = [(word,) for word in ("global_step", "global_steps", "step", "steps", "iteration", "iter")]
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
    """What was found there, for messages; None if `describe` does not read it."""
    path = os.fspath(path)
    if os.path.isfile(os.path.join(path, TRAINER_STATE)):
        return f"a Hugging Face Trainer checkpoint ({TRAINER_STATE})"
    if os.path.isfile(path) and is_torch_file(path):
        return "a file of torch.save"
    return None


def describe(path: str | os.PathLike[str], spec: object = None, as_training: bool | None = None) -> Source:
    """The state in a file of `torch.save`, or in a Trainer's directory."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return read_trainer(path, KIND)
    tree = read_torch_file(path, _ALLOWED)
    facts = {"written by": "torch.save"}
    lightning = isinstance(tree, dict) and _is_lightning(tree)
    if lightning:
        facts["written by"] = "Lightning"
        version = tree.get("pytorch-lightning_version")
        if isinstance(version, str):
            facts["lightning"] = version
    arranged = lightning if as_training is None else as_training
    state = tree
    if arranged:
        state = _lightning_state(tree) if lightning else _training_state(tree)
    return source_of(
        path,
        KIND,
        _without_records(state) if lightning else state,
        step=step_in(tree, *_STEPS),
        facts=facts,
        arranged=arranged,
    )


def _without_records(tree: Any) -> Any:
    """Lightning's ``AttributeDict`` is a dict with another way to read it."""
    if isinstance(tree, InertObject) and not tree.args and tree.state is None:
        tree = tree.items
    if type(tree) is dict:
        return {key: _without_records(value) for key, value in tree.items()}
    return type(tree)(map(_without_records, tree)) if type(tree) in (list, tuple) else tree


def _is_state_dict(tree: object) -> bool:
    """Whether this is a model's state dict: names and tensors, at least half of the entries."""
    if not isinstance(tree, dict) or not tree or not all(isinstance(key, str) for key in tree):
        return False
    return 2 * sum(isinstance(value, StoredTensor) for value in tree.values()) >= len(tree)


def _training_state(tree: object) -> object:
    if is_optimizer_state(tree):
        assert isinstance(tree, dict)
        return {"optimizer": optimizer_state(tree, {})}
    if not isinstance(tree, dict):
        return tree
    if _is_state_dict(tree):
        return {"model": tree}
    model_key = _model_key(tree)
    model = _tensors_of(tree[model_key]) if model_key is not None else {}
    optimizers = [key for key, value in tree.items() if is_optimizer_state(value)]
    arranged: dict[Any, Any] = {}
    for key, value in tree.items():
        if key in _OPTIMIZER_WORDS and "optimizer" not in tree and optimizers == [key]:
            key = "optimizer"
        elif key == model_key and key in _MODEL_WORDS and "model" not in tree:
            key = "model"
        arranged[key] = _with_names(value, model)
    return arranged


def _with_names(tree: object, model: Mapping[str, StoredTensor]) -> object:
    """Optimizers by the names of parameters: one, or several in a dict or a list (a GAN has two)."""
    if is_optimizer_state(tree):
        assert isinstance(tree, dict)
        return optimizer_state(tree, model)
    if type(tree) is dict and any(map(is_optimizer_state, tree.values())):
        return {key: _with_names(value, model) for key, value in tree.items()}
    if type(tree) in (list, tuple) and any(map(is_optimizer_state, tree)):  # type: ignore[call-overload]
        return type(tree)(_with_names(value, model) for value in tree)  # type: ignore[call-arg, attr-defined]
    return tree


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


def _lightning_state(tree: Mapping[Any, Any]) -> object:
    """``state_dict`` is the model, ``optimizer_states`` the optimizer; several of them stay a list."""
    model = _tensors_of(tree["state_dict"])
    names = {"state_dict": "model", "optimizer_states": "optimizer"}
    arranged: dict[Any, Any] = {}
    for key, value in tree.items():
        if key == "optimizer_states" and isinstance(value, list) and len(value) == 1:
            value = value[0]
        name = names.get(key, key)
        if name != key and name in tree:
            name = key
        arranged[name] = _with_names(value, model)
    return arranged
