"""Directories ``checkpoint-N`` of Hugging Face's Trainer, for `torch_file.source`.

The model's files, ``optimizer.pt``, ``scheduler.pt``, ``scaler.pt``, the states of random generators and
``trainer_state.json``. The optimizer counts parameters; where shapes do not prove which is which, the numbers
stay.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.universal.hf.source import (
    WeightFiles,
    carried_files,
    find_weights,
    read_weights,
)
from everystep.universal.optimizer_names import is_named, is_optimizer_state, optimizer_state
from everystep.universal.source import Source, SourceLeaf
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file

TRAINER_STATE = "trainer_state.json"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")
_MAX_JSON_NBYTES = 256 << 20


def read_trainer(path: str, kind: str) -> Source:
    """Everything in a directory, as a training state."""
    facts = {"written by": "Hugging Face Trainer"}
    trainer = _read_json(os.path.join(path, TRAINER_STATE))
    if not isinstance(trainer, dict):
        raise CorruptCheckpoint("the file is not a JSON object", path=os.path.join(path, TRAINER_STATE))
    model = _model(path)
    state: dict[str, Any] = {"model": model}
    optimizer = os.path.join(path, "optimizer.pt")
    if os.path.exists(optimizer):
        tree = read_torch_file(optimizer)
        if not is_optimizer_state(tree):
            raise UnsupportedSource(f"{optimizer}: this is not the state of a torch optimizer")
        state["optimizer"] = optimizer_state(tree, model)
        if not is_named(state["optimizer"]):
            facts["optimizer state"] = "by number: the files do not prove which parameter is which"
    for file, place in (("scheduler.pt", "lr_scheduler"), ("scaler.pt", "scaler")):
        where = os.path.join(path, file)
        if os.path.exists(where):
            state[place] = read_torch_file(where)
    state.update(_random(path, facts))
    counters = ("global_step", "epoch")
    state.update({key: trainer[key] for key in counters if key in trainer})
    state["trainer"] = {key: value for key, value in trainer.items() if key not in counters}
    return source_of(
        path,
        kind,
        state,
        step=trainer.get("global_step"),
        facts=facts,
        carried=carried_files(path),
    )


def _model(path: str) -> dict[str, SourceLeaf | StoredTensor]:
    """The model's tensors by name."""
    weights = find_weights(path)
    if weights is None:
        adapter = next((name for name in _ADAPTERS if os.path.exists(os.path.join(path, name))), None)
        if adapter is None:
            raise IncompleteCheckpoint(
                "the directory has no model.safetensors, pytorch_model.bin or index of several of them",
                path=path,
            )
        weights = WeightFiles(adapter)
    model: dict[str, SourceLeaf | StoredTensor] = read_weights(path, weights)[0].get("model", {})
    return model


def _random(path: str, facts: dict[str, str]) -> dict[str, Any]:
    """The states of random generators. One that cannot be read becomes a fact, not an error."""
    states: dict[str, Any] = {}
    for name in sorted(os.listdir(path)):
        matched = _RANDOM.fullmatch(name)
        if matched is None:
            continue
        where = os.path.join(path, name)
        try:
            state = read_torch_file(where)
            source_of(where, "torch", state)
        except UnsupportedSource as error:
            facts[name] = f"not read: {error}"
        else:
            states[matched[1] or ""] = state
    if "" in states:
        return {"rng_state": states[""]}
    return {"rng_state": states} if states else {}


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
