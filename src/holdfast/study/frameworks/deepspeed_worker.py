"""DeepSpeed's FastFileWriter in the suite ``cost``, beside `torch.save` and Holdfast in one environment."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

EXTENSIONS = Path(sys.prefix) / "torch-extensions"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(EXTENSIONS))

import deepspeed
import torch

from holdfast.study.frameworks.api import Framework, Training
from holdfast.study.frameworks.torch_worker import (
    HoldfastOverlap,
    HoldfastSync,
    TorchMechanism,
    TorchSave,
    TorchTraining,
)

BUFFER_NBYTES = 64 << 20
"""Of the pinned memory, as in the examples of DeepNVMe."""
STALE_SECONDS = 900.0
_BLOCK_NBYTES, _QUEUE_DEPTH = 1 << 20, 32


class FastWriter(TorchMechanism):
    """`torch.save` into a FastFileWriter, which writes past the page cache with libaio.

    It syncs its file when it is closed, also where a save need not be durable.
    """

    key, title, suffix = "fast-file-writer", "FastFileWriter", ".pt"

    @classmethod
    def missing(cls) -> str | None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        found = AsyncIOBuilder().is_compatible(verbose=False)
        return None if found else "DeepSpeed's async_io does not build here: apt install libaio-dev"

    @classmethod
    def prepare(cls) -> None:
        """Compiles its library, or finds it compiled. A build that was killed leaves a lock behind."""
        from deepspeed.ops.op_builder import AsyncIOBuilder

        for lock in EXTENSIONS.glob("*/lock"):
            if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                lock.unlink(missing_ok=True)
        AsyncIOBuilder().load(verbose=False)

    def open(self) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self._handle = (
            AsyncIOBuilder()
            .load(verbose=False)
            .aio_handle(
                block_size=_BLOCK_NBYTES,
                queue_depth=_QUEUE_DEPTH,
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=1,
            )
        )
        self._buffer = self._handle.new_cpu_locked_tensor(BUFFER_NBYTES, torch.empty(0, dtype=torch.uint8))

    def write(self, target: Path) -> None:
        from deepspeed.io import FastFileWriter, FastFileWriterConfig

        target.unlink(missing_ok=True)  # it overwrites, and leaves what an older file has beyond its end
        writer: Any = FastFileWriter(str(target), FastFileWriterConfig(self._handle, self._buffer))
        torch.save(self.state_dicts(), writer, _use_new_zipfile_serialization=False)
        writer.close()

    def load(self) -> None:
        self.training.load_state_dicts(torch.load(self.path))

    def close(self) -> None:
        self._handle.free_cpu_locked_tensor(self._buffer)


class DeepSpeedFramework(Framework):
    mechanisms = (TorchSave, FastWriter, HoldfastSync, HoldfastOverlap)

    def versions(self) -> dict[str, str]:
        return {"deepspeed": deepspeed.__version__, "torch": torch.__version__}

    def build(self, model: str, quick: bool, seed: int) -> Training:
        return TorchTraining(model, quick, seed)


FRAMEWORK = DeepSpeedFramework()
