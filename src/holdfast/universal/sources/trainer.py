"""Directories ``checkpoint-N`` of Hugging Face's Trainer, for `torch_save`.

The model's files, ``optimizer.pt``, ``scheduler.pt``, ``scaler.pt``, the states of random generators and
``trainer_state.json``. The optimizer counts parameters in the order of the model. Files of `torch.save` have
that order; safetensors files do not, so there it comes from what is known of the model's type.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from holdfast.universal.optimizer_names import collect_optimizer, is_optimizer_state
from holdfast.universal.sources.hf import (
    CONFIG,
    Weights,
    carried_files,
    find_weights,
    model_tensors,
    model_type_of,
)
from holdfast.universal.torch_file import StoredTensor, read_torch_file
from holdfast.universal.transformers_names import in_model_order
from holdfast.universal.trees import Collected

TRAINER_STATE = "trainer_state.json"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")
_MAX_JSON_NBYTES = 256 << 20


def collect_trainer(path: str, into: Collected) -> tuple[dict[str, str], tuple[str, ...]]:
    """Adds everything in a directory; gives facts about it, and the files to carry along."""
    facts = {"format": "Hugging Face Trainer"}
    state = _read_json(os.path.join(path, TRAINER_STATE))
    if not isinstance(state, dict):
        raise CorruptCheckpoint("the file is not a JSON object", path=os.path.join(path, TRAINER_STATE))
    model, ordered = _model(path)
    for name, tensor in model.items():
        into.add_tensor(f"model.{name}", tensor)
    optimizer = os.path.join(path, "optimizer.pt")
    if os.path.exists(optimizer):
        tree = read_torch_file(optimizer)
        if not is_optimizer_state(tree):
            raise UnsupportedSource(f"{optimizer}: this is not the state of a torch optimizer")
        if not collect_optimizer(into, tree, "optimizer", ordered):
            facts["optimizer state"] = "by number: the files do not tell the order of the parameters"
    for file, place in (("scheduler.pt", "lr_scheduler"), ("scaler.pt", "scaler")):
        where = os.path.join(path, file)
        if os.path.exists(where):
            into.add(read_torch_file(where), place)
    facts.update(_collect_random(path, into))
    for key, value in state.items():
        into.add_value(key if key in ("global_step", "epoch") else f"trainer.{key}", value)
    return facts, carried_files(path)


def _model(path: str) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors of the model by name; and the same in the model's order, or none if that is not known."""
    weights = find_weights(path)
    if weights is None:
        adapter = next((name for name in _ADAPTERS if os.path.exists(os.path.join(path, name))), None)
        if adapter is None:
            raise IncompleteCheckpoint(
                "the directory has no model.safetensors, pytorch_model.bin or index of several of them",
                path=path,
            )
        weights = Weights(adapter)
    model, _ = model_tensors(path, weights)
    if weights.is_torch:
        return model, model
    order = in_model_order(list(model), model_type_of(os.path.join(path, CONFIG)))
    return model, {name: model[name] for name in order or ()}


def _collect_random(path: str, into: Collected) -> dict[str, str]:
    """The states of random generators. Nothing depends on them: one that cannot be read is only told."""
    facts: dict[str, str] = {}
    for name in sorted(os.listdir(path)):
        matched = _RANDOM.fullmatch(name)
        if matched is None:
            continue
        try:
            tree = read_torch_file(os.path.join(path, name))
        except UnsupportedSource as error:
            facts[name] = f"not read: {error}"
            continue
        into.add(tree, f"rng_state.{matched[1]}" if matched[1] else "rng_state")
    return facts


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
