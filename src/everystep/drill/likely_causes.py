"""Why two trainings usually differ, by which leaf differs first and by the names in the state."""

from __future__ import annotations

import re
from collections.abc import Iterable

from everystep.drill.comparison import Difference

_RANDOM = re.compile(r"(^|[._])(rng|random\w*|generators?|seeds?)($|[._])", re.IGNORECASE)
# Whole components only: BatchNorm's num_batches_tracked is no place in the data.
_DATA = re.compile(
    r"(^|\.)(data\w*|\w*_?data|\w*loaders?|\w*samplers?|batch|batches|epoch|cursor)($|\.)", re.IGNORECASE
)
_CLOCK = re.compile(r"(^|[._])(\w*time|clock|elapsed|started|date|pid|host\w*|uuid)($|[._])", re.IGNORECASE)
_BUFFER = re.compile(r"(running_mean|running_var|num_batches_tracked|(^|[._])(ema|shadow|average\w*|swa)\b)")
_OPTIMIZER = re.compile(
    r"(^|[._])(opt|optim|optimizers?|schedulers?|scaler|exp_avg\w*|momentum\w*)($|[._])", re.IGNORECASE
)

UNDISTURBED = (
    "seeds that are not fixed, or taken from the time, the process id, os.urandom or hash() "
    "(set PYTHONHASHSEED, sort before you iterate over a set)",
    "kernels that add up in any order: torch.use_deterministic_algorithms(True), on CUDA with "
    "CUBLAS_WORKSPACE_CONFIG=:4096:8",
    "workers or threads that finish in another order, another number of threads, values of the clock",
)
_UNSEEDED = (
    "{name} belongs to a generator that the script does not seed, whether it draws from it or not: "
    "random.seed(0); numpy.random.seed(0); torch.manual_seed(0)"
)
_CLOCK_HINT = (
    "{name} depends on the clock or the process: keep it out of the state, or out of what training uses"
)
_DATA_HINT = (
    "{name}: the place in the data does not come back; wrap the loader with everystep.integrations.data, "
    "or draw the batch from the step number"
)
_RANDOM_HINT = (
    "{name}: a random number generator is in the state, but something draws from it between restore() and "
    "the first step, or fewer draws are made after a resume"
)
_NO_RANDOM = (
    'random number generators are not in the state: add "rng": everystep.rng() '
    "(Python, NumPy, torch; dropout, shuffling and augmentation draw from them)"
)
_NO_DATA = (
    'the order of the data is not in the state: add the loader ("data": everystep.integrations.data...), '
    "or draw each batch from the step number"
)
_BUFFER_HINT = "{name} is a buffer or an average: is the object in the state the one that training updates?"
_OPTIMIZER_HINT = (
    "{name}: the optimizer or schedule differs: is it changed after restore() "
    "(learning rate, parameter groups)?"
)
_REST = (
    "kernels that add up in any order, seeds taken from the time or the process id, anything else that the "
    "next step depends on and the state does not hold"
)


def likely_causes(difference: Difference, state: Iterable[str], *, undisturbed_too: bool) -> tuple[str, ...]:
    """What commonly causes such a difference, the likeliest first. `state`: all names in it."""
    if undisturbed_too:
        unseeded = _first(_RANDOM, difference.names)
        return (_UNSEEDED.format(name=unseeded), *UNDISTURBED) if unseeded is not None else UNDISTURBED
    everything = list(state)
    found = []
    for pattern, hint in ((_CLOCK, _CLOCK_HINT), (_RANDOM, _RANDOM_HINT), (_DATA, _DATA_HINT)):
        name = _first(pattern, difference.names)
        if name is not None:
            found.append(hint.format(name=name))
    if _first(_RANDOM, everything) is None:
        found.append(_NO_RANDOM)
    if _first(_DATA, everything) is None:
        found.append(_NO_DATA)
    # Where weights differ, what is computed from them does too; alone, these say more.
    for pattern, hint in ((_BUFFER, _BUFFER_HINT), (_OPTIMIZER, _OPTIMIZER_HINT)):
        if pattern.search(difference.name) and all(pattern.search(name) for name in difference.names):
            found.append(hint.format(name=difference.name))
    return (*found, _REST)


def _first(pattern: re.Pattern[str], names: Iterable[str]) -> str | None:
    return next((name for name in names if pattern.search(name)), None)
