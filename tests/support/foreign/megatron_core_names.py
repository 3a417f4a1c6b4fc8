"""The names that leaves of a Megatron-Core checkpoint get."""

from __future__ import annotations

import re

import torch


def our_names(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The leaves that a stored tensor should be."""
    matched = re.fullmatch(r"optimizer\.state\.(\w+)\.(.*)", name)
    state = "" if matched is None else "." + {"param": "fp32"}.get(matched[1], matched[1])
    before, parameter = ("model.", name) if matched is None else ("optimizer.", matched[2])
    if ".layers." not in parameter:
        return {before + parameter + state: tensor}
    return {
        before + parameter.replace(".layers.", f".layers.{number}.") + state: tensor[number]
        for number in range(len(tensor))
    }
