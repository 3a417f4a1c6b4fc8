"""Names of Keras variables that are the same in every process that builds the same model.

Keras numbers layers without a name through a whole process: the first model has ``dense``, the next
``dense_1``. Here they are numbered in the model. Names that a user has given stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any


def named(variables: Iterable[Any]) -> dict[str, Any]:
    """The variables of a layer, a model or a metric by their paths, such as ``sequential.dense.kernel``."""
    variables = list(variables)
    names = _names(tuple(variable.path for variable in variables))
    return dict(zip(names, variables, strict=True))


def named_slots(variables: Iterable[Any], trained: Iterable[Any]) -> dict[str, Any]:
    """The variables of an optimizer: those that belong to a variable that it trains are named after it."""
    variables = list(variables)
    own = tuple(variable.path for variable in variables)
    names = _slot_names(own, tuple(variable.path for variable in trained))
    return dict(zip(names, variables, strict=True))


@lru_cache(maxsize=64)  # every save asks again
def _names(paths: tuple[str, ...]) -> tuple[str, ...]:
    automatic = _automatic_names()
    known: dict[tuple[str, str], str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for path in paths:
        place = ""
        for part in path.split("/"):
            if (place, part) not in known:
                base = re.sub(r"_\d+$", "", part)
                if base in automatic:
                    number = counts[place, base]
                    counts[place, base] += 1
                    known[place, part] = f"{base}_{number}" if number else base
                else:
                    known[place, part] = part
            place = f"{place}.{known[place, part]}" if place else known[place, part]
        found.append(place)
    return _unique(found)


@lru_cache(maxsize=64)
def _slot_names(paths: tuple[str, ...], trained: tuple[str, ...]) -> tuple[str, ...]:
    # Keras joins both names with underscores: adam/sequential_dense_kernel_momentum.
    of = {path.replace("/", "_"): name for path, name in zip(trained, _names(trained), strict=True)}
    longest_first = sorted(of, key=len, reverse=True)
    found: list[str | None] = []
    others = []
    for path in paths:
        own = path.partition("/")[2] or path
        reference = next((other for other in longest_first if own.startswith(f"{other}_")), None)
        if reference is None:
            others.append(own)
        rest = "" if reference is None else own[len(reference) + 1 :].replace("/", ".")
        found.append(None if reference is None else f"{of[reference]}.{rest}")
    names = iter(_names(tuple(others)))
    return _unique(next(names) if name is None else name for name in found)


def _automatic_names() -> set[str]:
    """What Keras calls objects without a name, without the number."""
    import keras
    from keras.src.utils.naming import to_snake_case

    waiting = [keras.Layer, keras.metrics.Metric, keras.random.SeedGenerator, keras.Variable]
    found: set[str] = set()
    while waiting:
        kind = waiting.pop()
        found.add(to_snake_case(kind.__name__))
        waiting.extend(kind.__subclasses__())
    return found


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for wanted in names:
        name, count = wanted, 0
        while name in found:
            count += 1
            name = f"{wanted}~{count}"
        found[name] = None
    return tuple(found)
