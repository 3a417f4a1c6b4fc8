"""The files of a save on their way to the disk, each on a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from holdfast.checkpointer.guard import Guard
from holdfast.deepspeed.objects import trained_tensors
from holdfast.engine import fs
from holdfast.errors import MutatedDuringSave
from holdfast.integrations.deepspeed_tags import partial_of
from holdfast.state import flatten
from holdfast.store import Options, SingleCommit, Target

_TUNING = Options().tuning()


class Write:
    """A file on its way to the disk, on a thread of its own. An interpreter that ends waits for it."""

    def __init__(self, path: str, state: Any, step: int, *, watched: bool) -> None:
        flat = flatten(state)
        self._guard = Guard({0: list(flat.leaves)} if watched else {})
        self._path = path
        self._failure: Exception | None = None
        commit = SingleCommit(Target(path), step, {}, _TUNING)
        self._thread = threading.Thread(target=self._run, args=(commit, flat), name="holdfast-deepspeed")
        self._thread.start()

    def _run(self, commit: SingleCommit, flat: Any) -> None:
        try:
            commit.run(flat)
        except Exception as error:
            self._failure = error

    def wait(self) -> Exception | None:
        """Returns when it is durable, or the error."""
        self._thread.join()
        if changed := self._guard.take():
            text = f"{self._path}: {', '.join(changed[:3])} changed while it was written"
            return MutatedDuringSave(f"{text}. Save without overlap=True", leaves=changed)
        return self._failure


def copies(engine: DeepSpeedEngine) -> Callable[[Any], Any]:
    """Copies tensors that may change before the next step: the buffers of the model."""
    stay = {tensor.untyped_storage().data_ptr() for tensor in trained_tensors(engine)}

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in stay:
            return value.detach().clone()
        return value

    return leaf


def save_for_others(state: Any, path: str) -> None:
    """The weights of ``save_16bit_model``: a file as DeepSpeed writes it, but whole and durable."""
    with open(partial_of(path), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial_of(path), path)
    fs.sync_dir(os.path.dirname(path))
