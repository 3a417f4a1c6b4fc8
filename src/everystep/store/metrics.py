"""Metrics of a checkpoint: numbers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.state.value_encoder import is_text


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as they are stored: their present values, even if they are tensors that change later."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f'metrics must be a dict such as {{"loss": 0.5}}, not {metrics!r}')
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: object) -> str:
    if not isinstance(name, str) or not is_text(name):
        raise TypeError(f"the name of a metric must be text, not {name!r}")
    return name


def _number(name: str, value: Any) -> float:
    reason: Exception | None = None
    if not isinstance(value, (str, bytes, bytearray)):  # of which float() would take some
        try:
            return float(value)
        except Exception as error:  # numpy, torch and others each have their own
            reason = error
    raise TypeError(f"metrics[{name!r}] must be a number, not {value!r}") from reason
