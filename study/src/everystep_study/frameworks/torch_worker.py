"""PyTorch in the study: `torch.save`, `torch.distributed.checkpoint`, safetensors, Everystep."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import torch

from everystep_study.frameworks.api import Framework, Training
from everystep_study.frameworks.torch_mechanisms import Dcp, DcpAsync, Safetensors, TorchSave, TorchSaveLegacy
from everystep_study.frameworks.torch_probe import DcpDefault, EverystepTorch, GeneralCheckpoint, TorchProbe
from everystep_study.frameworks.torch_training import TorchTraining
from everystep_study.mechanism import EverystepOverlap, EverystepSync


class TorchFramework(Framework):
    mechanisms = (TorchSave, TorchSaveLegacy, Dcp, DcpAsync, Safetensors, EverystepSync, EverystepOverlap)
    defaults = (GeneralCheckpoint, DcpDefault, EverystepTorch)

    def versions(self) -> dict[str, str]:
        found = {"torch": torch.__version__, "numpy": np.__version__}
        if Safetensors.missing() is None:
            found["safetensors"] = importlib.metadata.version("safetensors")
        return found

    def build(self, model: str, quick: bool, seed: int) -> Training:
        return TorchTraining(model, quick, seed)

    def probe(self, seed: int) -> TorchProbe:
        return TorchProbe(seed)


FRAMEWORK = TorchFramework()
