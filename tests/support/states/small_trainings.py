"""A small training: a model with BatchNorm, AdamW, random numbers, and a digest of all of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import everystep


def build(width: int) -> dict[str, Any]:
    """The state before the first step, always the same."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 4)]
    model = torch.nn.Sequential(*layers)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rng": everystep.rng()}


def advance(state: dict[str, Any], width: int) -> None:
    """One step, on random numbers."""
    state["optimizer"].zero_grad()
    state["model"](torch.randn(4, width)).square().mean().backward()
    state["optimizer"].step()


def digest(state: dict[str, Any]) -> str:
    """Of every bit that the next step depends on."""
    total = hashlib.sha256()
    for tensor in state["model"].state_dict().values():
        total.update(tensor.numpy().tobytes())
    for slots in state["optimizer"].state_dict()["state"].values():
        for tensor in slots.values():
            total.update(tensor.numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    return total.hexdigest()
