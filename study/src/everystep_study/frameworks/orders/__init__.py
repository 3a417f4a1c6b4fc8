"""The orders that a worker follows. The harness sends them; they run in the framework's own process.

An order is a function: its first argument is the `Context` of the worker, the others come with the order, and
what it returns is the answer. They are grouped as the suites that send them are (`everystep_study.suites`).

| module | what it owns |
|---|---|
| this one | which orders there are |
| `context` | what a worker keeps from order to order; describing the framework and building a training |
| `cost` | how much longer a training takes with checkpoints, and where the time of one save goes |
| `formats` | one save, load or partial read and what it cost; checkpoints that are to be damaged |
| `determinism` | a resumed training compared with one that was never stopped |
| `bitflips` | flipped bits in weights and in files, and the trainings and loads that meet them |

They need numpy and Everystep, and nothing else of the environment. The suites choose what is ordered, repeat
it and judge it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everystep_study.frameworks.orders import bitflips, context, cost, determinism, formats

_FUNCTIONS: tuple[Callable[..., dict[str, Any]], ...] = (
    context.hello,
    context.prepare,
    context.build,
    cost.train,
    cost.split,
    formats.save,
    formats.load,
    formats.part,
    formats.overwrite,
    formats.plant,
    determinism.determinism,
    determinism.ingredients,
    bitflips.flip_and_train,
    bitflips.flip_in_file,
)
ORDERS = {function.__name__: function for function in _FUNCTIONS}
