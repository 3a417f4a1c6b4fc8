"""What the ranks of a world do for the table of layouts: save in each of its layouts, restore in each."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

import holdfast
from distributed.layouts import LAYOUTS, STEPS, Truth, fresh_training, saved_training

TIMEOUT = 120.0


def is_run(number: int) -> bool:
    """Every other layout saves with a Checkpointer into a run, the others with `holdfast.save`."""
    return number % 2 == 1


def save_layouts(folder: str, numbers: Sequence[int]) -> list[int]:
    """Save the truth in each of these layouts; how many bytes each took."""
    stored = []
    for number in numbers:
        path, training = os.path.join(folder, str(number)), saved_training(LAYOUTS[number])
        if is_run(number):
            with holdfast.Checkpointer(
                path, training.state, timeout=TIMEOUT, preemption=False, mode="snapshot"
            ) as checkpointer:
                saving = checkpointer.save(STEPS)
                assert saving is not None
                stored.append(saving.wait().nbytes)
        else:
            stored.append(holdfast.save(path, training.state, step=STEPS, timeout=TIMEOUT).nbytes)
    return stored


def load_layouts(
    folder: str, sources: Sequence[int], targets: Sequence[int]
) -> dict[tuple[int, int], list[str]]:
    """Restore each source in each target layout; what differs from the truth on this rank, cell by cell."""
    gc.freeze()  # all that was loaded before the fork: nothing to search again and again
    found: dict[tuple[int, int], list[str]] = {}
    for target in targets:
        expected = Truth.of(LAYOUTS[target])
        for source in sources:
            training = fresh_training(LAYOUTS[target], stepped=(source // 2) % 2 == 0)
            assert expected.differences(training), "what is compared is not what was restored"
            try:
                restore(os.path.join(folder, str(source)), training.state, run=is_run(source))
                found[source, target] = expected.differences(training)
            except holdfast.HoldfastError as error:  # all ranks raise, and the other cells can still be tried
                found[source, target] = [f"{type(error).__name__}: {error}"]
        gc.collect()  # reducers of DDP hold on to groups
    return found


def restore(path: str, state: Any, *, run: bool) -> None:
    if not run:
        holdfast.load(path, state, timeout=TIMEOUT)
        return
    with holdfast.Checkpointer(path, state, timeout=TIMEOUT, preemption=False) as checkpointer:
        assert checkpointer.restore() == STEPS
