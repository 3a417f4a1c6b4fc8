"""PyTorch in the study: `torch.save`, `torch.distributed.checkpoint`, safetensors, Everystep."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from everystep_study.frameworks import torch_models
from everystep_study.frameworks.api import (
    PATIENCE_SECONDS,
    Arrays,
    EverystepMechanism,
    Framework,
    Mechanism,
    Training,
)
from everystep_study.frameworks.models import size_of
from everystep_study.frameworks.torch_probe import (
    DcpCheckpoint,
    EverystepCheckpoint,
    GeneralCheckpoint,
    TorchProbe,
)
from everystep_study.peers.base import missing_modules, sync_tree
from everystep_study.training_model import flatten


class TorchTraining(Training):
    def __init__(self, model: str, quick: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.optimizer, self._batch = torch_models.build(size_of(model, quick))
        self.step()  # makes the optimizer's state

    def step(self) -> float:
        loss = torch_models.loss_of(self.model, self._batch)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def weights(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}

    def optimizer_arrays(self) -> Arrays:
        found = flatten({"state": self.optimizer.state_dict()["state"]})
        return {name: tensor.numpy() for name, tensor in found}

    def set_weights(self, arrays: Arrays) -> None:
        live = self.model.state_dict()
        for name, array in arrays.items():
            live[name].copy_(torch.from_numpy(array))

    def everystep_state(self, weights_only: bool) -> object:
        return {"model": self.model} if weights_only else {"model": self.model, "optimizer": self.optimizer}

    def state_dicts(self, weights_only: bool) -> dict[Any, Any]:
        model: dict[Any, Any] = {"model": self.model.state_dict()}
        return model if weights_only else {**model, "optimizer": self.optimizer.state_dict()}

    def load_state_dicts(self, found: Mapping[str, Any]) -> None:
        self.model.load_state_dict(found["model"])
        if "optimizer" in found:
            self.optimizer.load_state_dict(found["optimizer"])


class TorchMechanism(Mechanism):
    training: TorchTraining

    def state_dicts(self) -> dict[Any, Any]:
        return self.training.state_dicts(self.weights_only)


class TorchSave(TorchMechanism):
    """`torch.save` of both state dicts, as the tutorial on checkpoints has it; `torch.load` as by default."""

    key, title, suffix = "torch-zip", "torch.save", ".pt"
    zipped = True

    def write(self, target: Path) -> None:
        torch.save(self.state_dicts(), target, _use_new_zipfile_serialization=self.zipped)

    def load(self) -> None:
        self.training.load_state_dicts(torch.load(self.path))

    def read_part(self, name: str) -> NDArray[Any]:
        found: torch.Tensor = torch.load(self.path, mmap=True)["model"][name]
        return found.clone().numpy()


class TorchSaveLegacy(TorchSave):
    """The form before 1.6: pickles one after the other in one stream."""

    key, title = "torch-legacy", "torch.save, legacy"
    zipped = False

    def read_part(self, name: str) -> NDArray[Any]:
        raise NotImplementedError("this form can only be read whole")


class Dcp(TorchMechanism):
    """`torch.distributed.checkpoint` of one process. It syncs its files, not their directory, unless told not
    to.
    """

    key, title = "dcp", "DCP"

    def open(self) -> None:
        import torch.distributed.checkpoint  # noqa: F401  (about two seconds)

    def write(self, target: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(
            self.state_dicts(), storage_writer=FileSystemWriter(target, sync_files=self.durable), no_dist=True
        )

    def load(self) -> None:
        found = self.state_dicts()
        self._read(found)
        self.training.load_state_dicts(found)

    def read_part(self, name: str) -> NDArray[Any]:
        empty = torch.empty_like(self.training.model.state_dict()[name])
        self._read({"model": {name: empty}})
        return empty.numpy()

    def _read(self, into: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            load(into, storage_reader=FileSystemReader(self.path), no_dist=True)
        except CheckpointException as error:  # no Exception: it would end the process
            raise RuntimeError(str(error)) from error


class DcpAsync(Dcp):
    """`async_save`: copied in the call, into memory that is kept, and written by a thread."""

    key, title = "dcp-async", "DCP, async"
    background = True

    def open(self) -> None:
        super().open()
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._pending: Any = None

    def write(self, target: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.wait()  # it has one save under way at most
        writer = FileSystemWriter(target, sync_files=self.durable)
        begun: Any = async_save(
            self.state_dicts(), storage_writer=writer, no_dist=True, async_stager=self._stager
        )
        done = getattr(begun, "upload_completion", begun)
        # The files are synced where they are written; the directory where the writing ends.
        self._pending = _after(done, lambda: sync_tree(target)) if self.durable else done

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result(PATIENCE_SECONDS)

    def close(self) -> None:
        self.wait()
        self._stager.close()


class Safetensors(TorchMechanism):
    """`safetensors.torch.save_file` of all tensors under flat names. Plain values (learning rates) have no
    place.
    """

    key, title, suffix = "safetensors", "safetensors", ".safetensors"

    @classmethod
    def missing(cls) -> str | None:
        return missing_modules("safetensors")

    def write(self, target: Path) -> None:
        from safetensors.torch import save_file

        save_file(dict(flatten(self.state_dicts())), target)

    def load(self) -> None:
        from safetensors.torch import load_file

        live = dict(flatten(self.state_dicts()))
        for name, tensor in load_file(self.path).items():
            live[name].copy_(tensor)

    def read_part(self, name: str) -> NDArray[Any]:
        from safetensors import safe_open

        with safe_open(self.path, framework="np") as file:
            return np.asarray(file.get_tensor(f"model.{name}"))


class EverystepSync(EverystepMechanism):
    key, title, mode = "everystep-sync", "Everystep, sync", "sync"


class EverystepOverlap(EverystepMechanism):
    key, title, mode = "everystep-overlap", "Everystep, overlap", "overlap"
    background = True


class TorchFramework(Framework):
    mechanisms = (TorchSave, TorchSaveLegacy, Dcp, DcpAsync, Safetensors, EverystepSync, EverystepOverlap)

    defaults = (GeneralCheckpoint, DcpCheckpoint, EverystepCheckpoint)

    def versions(self) -> dict[str, str]:
        found = {"torch": torch.__version__, "numpy": np.__version__}
        if Safetensors.missing() is None:
            found["safetensors"] = importlib.metadata.version("safetensors")
        return found

    def build(self, model: str, quick: bool, seed: int) -> Training:
        return TorchTraining(model, quick, seed)

    def probe(self, seed: int) -> TorchProbe:
        return TorchProbe(seed)


def _after(done: Any, call: Any) -> Any:
    """A future that ends when `done` has ended and `call` has been made, on the thread that ended `done`."""
    from concurrent.futures import Future

    after: Future[None] = Future()

    def finish(ended: Any) -> None:
        try:
            ended.result()
            call()
        except BaseException as error:
            after.set_exception(error)
        else:
            after.set_result(None)

    done.add_done_callback(finish)
    return after


FRAMEWORK = TorchFramework()
