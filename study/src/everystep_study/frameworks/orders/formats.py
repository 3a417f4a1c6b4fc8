"""The orders of the suite ``formats``: one save, one load, one array of it, and what they cost.

Also what the suite's damage needs from inside of the process: a checkpoint that is overwritten while the
process is killed, and one in which code is planted. The damage itself is done by `suites.damage`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from everystep_study.costs import cost_of, wall_seconds
from everystep_study.frameworks.api import Arrays, Training
from everystep_study.frameworks.orders.context import Context, nbytes_of
from everystep_study.peers.base import files_below, sync_tree
from everystep_study.results import PEAK_NBYTES, SECONDS


def save(context: Context, mechanism: str, directory: str, weights_only: bool = False) -> dict[str, Any]:
    """One save, made durable after the clock has stopped. `load` and `part` compare with it."""
    with context.opened(mechanism, directory, durable=True, weights_only=weights_only) as opened:
        _, readings = cost_of(opened.save_and_wait)
        if not opened.always_durable:
            opened.sync()
        path = opened.path
    arrays = context.training.arrays(opened.weights_only)
    context.digests[directory] = digest(arrays)
    stored = sum(file.stat().st_size for file in files_below(path))
    return {
        "readings": {
            SECONDS: readings[SECONDS],
            PEAK_NBYTES: readings.get(PEAK_NBYTES, 0.0),
            "stored_nbytes": stored,
            "arrays_nbytes": nbytes_of(arrays),
        },
        "path": str(path),
        "digest": context.digests[directory],
    }


def load(
    context: Context, mechanism: str, directory: str, weights_only: bool = False, again: bool = False
) -> dict[str, Any]:
    """Loads into a training that was built from another seed; `equal` tells whether all came back.

    `again`: into the same one as before, after a step that changes all of it, and without looking at the
    cost: for many loads of a small checkpoint. Building and measuring take longer than such a load.
    """
    model, quick, seed = context.built
    fresh = _changed(context) if again else None
    if fresh is None:
        fresh = context.framework.build(model, quick, seed + 1)
    context.filled = fresh if again else None  # kept, it would count as memory of the next load
    with context.opened(
        mechanism, directory, durable=False, weights_only=weights_only, training=fresh
    ) as opened:
        readings = {}
        if again:
            opened.load()
        else:
            _, cost = cost_of(opened.load)
            readings = {SECONDS: cost[SECONDS], PEAK_NBYTES: cost.get(PEAK_NBYTES, 0.0)}
    found = digest(fresh.arrays(opened.weights_only))
    readings["equal"] = float(found == context.digests.get(directory))
    return {"readings": readings, "digest": found}


def _changed(context: Context) -> Training | None:
    """The training that was loaded into before, one step on; None if there is none that can step."""
    if context.filled is not None:
        try:
            context.filled.step()
        except Exception:  # a load that failed may have left anything in it
            context.filled = None
    return context.filled


def part(context: Context, mechanism: str, directory: str, weights_only: bool = False) -> dict[str, Any]:
    """Reads one weight of middling size, if the mechanism has a way."""
    by_size = sorted(context.training.weights().items(), key=lambda item: item[1].nbytes)
    name, array = by_size[len(by_size) // 2]
    with context.opened(mechanism, directory, durable=False, weights_only=weights_only) as opened:
        try:
            got, readings = cost_of(lambda: opened.read_part(name))
        except NotImplementedError:
            return {"possible": 0.0}
    same = got.shape == array.shape and np.array_equal(got, array)
    return {
        "possible": float(same),
        "part_seconds": readings[SECONDS],
        "part_nbytes": float(array.nbytes),
        "part_peak_nbytes": readings.get(PEAK_NBYTES, 0.0),
    }


def overwrite(context: Context, mechanism: str, directory: str) -> dict[str, float]:
    """Two saves to one name with a step between them. The process is to be killed during the second.

    The file ``DIRECTORY.begun`` appears when the second begins, with the digests of both states.
    """
    training = context.training
    with context.opened(mechanism, directory, durable=True) as opened:
        opened.save_and_sync()
        opened.wait()
        sync_tree(opened.directory)
        old = digest(training.arrays(opened.weights_only))
        training.step()
        begun = Path(f"{directory}.new")
        begun.write_text(f"{old} {digest(training.arrays(opened.weights_only))}")
        begun.rename(f"{directory}.begun")
        return {SECONDS: wall_seconds(opened.save_and_sync) + wall_seconds(opened.wait)}


def plant(context: Context, mechanism: str, directory: str, marker: str) -> dict[str, Any]:
    with context.opened(mechanism, directory, durable=False) as opened:
        return {"planted": opened.plant(Path(marker))}


def digest(arrays: Arrays) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
