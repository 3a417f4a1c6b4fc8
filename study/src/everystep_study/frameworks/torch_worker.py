"""PyTorch in the study: `torch.save`, `torch.distributed.checkpoint`, safetensors, Everystep."""

from __future__ import annotations

from everystep_study.frameworks.api import Framework
from everystep_study.frameworks.torch_probe import DcpDefault, EverystepTorch, GeneralCheckpoint, TorchProbe
from everystep_study.frameworks.torch_training import TorchTraining
from everystep_study.mechanisms.mechanism import EverystepOverlap, EverystepSync
from everystep_study.mechanisms.torch_mechanisms import Dcp, DcpAsync, Safetensors, TorchSave, TorchSaveLegacy

FRAMEWORK = Framework(
    packages={"torch": "torch", "numpy": "numpy", "safetensors": "safetensors"},
    training=TorchTraining,
    probe=TorchProbe,
    mechanisms=(TorchSave, TorchSaveLegacy, Dcp, DcpAsync, Safetensors, EverystepSync, EverystepOverlap),
    defaults=(GeneralCheckpoint, DcpDefault, EverystepTorch),
)
