"""What Lightning saves and loads by itself, through Everystep: one checkpoint directory for each.

``ModelCheckpoint``, ``Trainer.save_checkpoint``, ``ckpt_path`` and ``Fabric.save`` dump their state to a
``CheckpointIO``, on rank 0: `EverystepIO`. Sharded strategies write files of their own instead;
`EverystepSharded` replaces that.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins import CheckpointIO

from everystep.engine import fs
from everystep.errors import CheckpointNotFound
from everystep.integrations.lightning.type_keys import with_names, with_types
from everystep.integrations.shared.folders import remove
from everystep.paths import local_path
from everystep.state.marks import rank_zero
from everystep.store import Options, is_checkpoint, load, save

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Strategy
else:
    _Strategy = object


class EverystepIO(CheckpointIO):
    """``Trainer(plugins=[EverystepIO()])``: each of Lightning's checkpoints is an Everystep checkpoint.

    It is a directory, durable and checksummed, that appears at once and whole. It still reads checkpoints
    that Lightning wrote without it, which are files.

    Args:
        options: How to write.
    """

    def __init__(self, options: Options | None = None) -> None:
        self._options = options

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise _no_storage_options("EverystepIO; give it options=everystep.Options(...)")
        with _replacing(path) as place:
            step, state = _step_in(checkpoint), with_names(checkpoint)
            save(place, state, step=step, overwrite=True, options=self._options, process_group="none")

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = local_path(path)
        if os.path.isfile(path):
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return found
        if not os.path.lexists(path):
            raise CheckpointNotFound(f"Checkpoint file not found: {path}")  # in Lightning's words
        loaded = with_types(load(path, process_group="none"))
        if map_location is not None:  # it has many forms; torch knows their meaning
            loaded = torch.load(_torch_file(loaded), map_location=map_location, weights_only=False)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        remove(path)


class EverystepSharded(_Strategy):
    """In front of a sharded strategy: ``class Sharded(EverystepSharded, ModelParallelStrategy): ...``.

    Then ``ModelCheckpoint``, ``Trainer.save_checkpoint`` and ``ckpt_path`` go through Everystep, and every
    rank writes what it holds, from its own memory: nothing is gathered or copied. It still reads checkpoints
    that the strategy wrote without it.
    """

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # `save_checkpoint` takes the model itself

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise _no_storage_options("EverystepSharded")
        own = ("state_dict", "optimizer_states")
        rest = with_names({key: value for key, value in checkpoint.items() if key not in own})
        optimizers = list(self.optimizers) if "optimizer_states" in checkpoint else []
        state = {"state_dict": self.model, "optimizers": optimizers, "rest": rank_zero(rest)}
        with _replacing(self.broadcast(local_path(filepath)), is_coordinator=self.is_global_zero) as place:
            save(place, state, step=_step_in(rest), overwrite=True)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = self.broadcast(local_path(checkpoint_path))
        if not is_checkpoint(path):
            native: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return native
        state = {"state_dict": self.model, "optimizers": list(self.optimizers), "rest": rank_zero(None)}
        # There are optimizers to restore in `fit` only.
        load(path, into=state, select=None if self.optimizers else ["state_dict", "rest"])
        return with_types(state["rest"].value)


def load_from_checkpoint(cls: type[Any], path: str | os.PathLike[str], **arguments: Any) -> Any:
    """``cls.load_from_checkpoint`` for what Everystep saved.

    Args:
        cls: The class of the ``LightningModule`` or ``LightningDataModule``.
        path: A checkpoint, or a run of `EverystepCallback`.
        arguments: Those of ``cls.load_from_checkpoint``.
    """
    found = load(path, process_group="none")
    if "rest" in found:
        found = {**found["rest"], "state_dict": found["state_dict"]}
    elif "state_dict" not in found:
        found = {
            "state_dict": found["model"],
            **found["extras"]["module"],
        }  # a hook may have put others there
    # The file was made here from plain values and tensors, so it is safe to load.
    return cls.load_from_checkpoint(_torch_file(found), **{"weights_only": False, **arguments})


@contextmanager
def _replacing(path: str | os.PathLike[str], *, is_coordinator: bool = True) -> Iterator[str]:
    """Where to save the checkpoint for `path`. `save` replaces nothing but checkpoints of Everystep.

    Lightning also saves over what it wrote without Everystep, and over its link ``last.ckpt``. This exchanges
    these for the new checkpoint when that is durable.
    """
    path = local_path(path)
    if not (os.path.islink(path) or os.path.isfile(path) or os.path.isfile(os.path.join(path, "meta.pt"))):
        yield path
        return
    place = f"{path}.new"
    if is_coordinator:
        remove(place)  # what a kill has left
    yield place
    if is_coordinator:
        fs.exchange(place, path)
        fs.sync_dir(os.path.dirname(path))
        remove(place)


def _no_storage_options(where: str) -> TypeError:
    """In Lightning's words, which programs may look for."""
    return TypeError(
        "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for "
        + where
    )


def _torch_file(state: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _step_in(checkpoint: dict[str, Any]) -> int:
    step = checkpoint.get("global_step", checkpoint.get("step", 0))
    return step if type(step) is int and step >= 0 else 0
