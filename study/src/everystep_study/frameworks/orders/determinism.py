"""The orders of the suite ``determinism``: a resumed training compared with one that was never stopped.

What a training consists of, and what can be left out of a restore, is said by the framework's `Probe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everystep_study.frameworks.orders.context import Context


def ingredients(context: Context) -> dict[str, Any]:
    return dict(context.framework.probe(0).ingredients)


def determinism(
    context: Context, steps: int, seed: int, without: str, default: str, directory: str
) -> dict[str, Any]:
    """2N steps against N steps, a restore into a new training of another seed, and N more.

    `without` is the ingredient that is left out; `default` the checkpoint that is used instead of a full
    one.
    """
    framework = context.framework
    whole = framework.probe(seed)
    losses = [whole.step() for _ in range(2 * steps)]
    expected = whole.weights()
    first = framework.probe(seed)
    early = [first.step() for _ in range(steps)]
    saved = first.capture()
    restored: dict[str, float] = {}
    if default:
        checkpoint = next(each for each in framework.defaults if each.key == default)()
        checkpoint.save(first, Path(directory))
        resumed = framework.probe(seed + 1)
        checkpoint.load(resumed, Path(directory))
        loaded = resumed.capture()
        restored = {f"restored, {key}": float(same(saved[key], loaded[key])) for key in saved}
    else:
        resumed = framework.probe(seed + 1)
        resumed.restore({key: value for key, value in saved.items() if key != without})
    resumed_losses = early + [resumed.step() for _ in range(steps)]
    differing = [
        step
        for step, (loss, other) in enumerate(zip(losses, resumed_losses, strict=True), 1)
        if loss != other
    ]
    found = resumed.weights()
    return {
        **restored,
        "steps": 2.0 * steps,
        "repeatable": float(losses[:steps] == early),
        "first_differing_step": float(differing[0]) if differing else 0.0,
        "largest_loss_difference": _largest(losses, resumed_losses),
        "largest_weight_difference": max(
            _largest(expected[name].ravel(), found[name].ravel()) for name in expected
        ),
        "equal": float(
            not differing and all(np.array_equal(expected[name], found[name]) for name in expected)
        ),
    }


def same(one: Any, other: Any) -> bool:
    """Whether two trees of containers, arrays and plain values are equal."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__array__"):
        first, second = (each.detach() if hasattr(each, "detach") else each for each in (one, other))
        return bool(np.array_equal(np.asarray(first), np.asarray(second)))
    return bool(one == other)


def _largest(expected: Any, found: Any) -> float:
    with np.errstate(all="ignore"):
        apart = np.abs(np.asarray(expected, np.float64) - np.asarray(found, np.float64))
    return float(np.nan_to_num(apart, nan=1e308, posinf=1e308).max(initial=0.0))
