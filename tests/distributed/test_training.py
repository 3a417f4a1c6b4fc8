"""Trainings of several processes: a checkpoint per step beside them, and resuming as if nothing had been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import everystep
from everystep.store import list_steps, step_name
from support.worlds.launcher import launch, values
from support.worlds.ranks_training import Kind, Trained, array_digest, train

STEPS, STOP = 11, 6


def _uninterrupted_and_stopped(folder: str, kind: Kind) -> tuple[Trained, Trained]:
    whole = train(f"{folder}/whole", kind, STEPS, seed=1)
    return whole, train(f"{folder}/stopped", kind, STOP, seed=1)


def _resume(folder: str, kind: Kind) -> Trained:
    return train(f"{folder}/stopped", kind, STEPS, seed=2)


def _go_on(folder: str, kind: Kind, step: int) -> Trained:
    return train(f"{folder}/whole", kind, step, seed=3)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_resumed_training_is_the_one_that_was_not_interrupted(kind: Kind, tmp_path: Path) -> None:
    folder = str(tmp_path)
    began = values(launch(2, _uninterrupted_and_stopped, folder, kind, timeout=240.0))
    resumed = values(launch(2, _resume, folder, kind, timeout=240.0))
    for (whole, stopped), again in zip(began, resumed, strict=True):
        assert (whole.start, stopped.start, again.start) == (0, 0, STOP)
        assert again.restored == whole.digests[STOP]
        assert {**stopped.losses, **again.losses} == whole.losses
        assert {**stopped.digests, **again.digests} == whole.digests
        for part in (whole, stopped, again):
            assert part.failed == part.warnings == ()
    whole_ranks = [whole for whole, _ in began]
    assert whole_ranks[0].digests[STEPS]["own"] != whole_ranks[1].digests[STEPS]["own"]
    _check_saved_in_place(whole_ranks, kind)
    for step, expected in whole_ranks[0].digests.items():
        _check_stored(tmp_path / "whole" / step_name(step), expected)

    _check_other_worlds(folder, kind, whole_ranks[0].digests[STEPS])


def _check_other_worlds(folder: str, kind: Kind, expected: Mapping[str, str]) -> None:
    """The same run goes on with one rank, then with four: each begins with exactly what was saved.

    In the data, too: in the middle of an epoch, after the samples that were given to any rank.
    """
    before = 2
    for step, world in ((STEPS + 1, 1), (STEPS + 2, 4)):
        ranks = values(launch(world, _go_on, folder, kind, step, timeout=240.0))
        for rank, trained in enumerate(ranks):
            assert trained.start == step - 1
            assert _common(trained.restored) == _common(expected)
            assert [saved.step for saved in trained.saved] == [step]
            # Ranks that were there before have got their own back; the others keep theirs, and say so.
            assert _count(trained.warnings, "stays as it is") == (rank >= before)
            assert _count(trained.warnings, "was not restored, because") == (rank == 0 and before > world)
        expected = ranks[0].digests[step]
        _check_stored(Path(folder, "whole", step_name(step)), expected)
        before = world


def _count(texts: Sequence[str], part: str) -> int:
    return sum(part in text for text in texts)


def _common(digests: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in digests.items() if name != "own"}


def _check_saved_in_place(ranks: list[Trained], kind: Kind) -> None:
    """Parameters and moments were read where they lie, while the training went on; little was copied."""
    held = [trained.local_nbytes for trained in ranks]
    one_copy = held[0] if kind == "ddp" else sum(held)
    for index in range(STEPS):
        saves = [trained.saved[index] for trained in ranks]
        assert {saved.step for saved in saves} == {index + 1}
        assert all(saved.mode == "overlap" and saved.in_place_nbytes > 0 for saved in saves)
        assert sum(saved.in_place_nbytes for saved in saves) >= one_copy
        assert sum(saved.copied_nbytes for saved in saves) < one_copy // 10


def _check_stored(path: Path, expected: Mapping[str, str]) -> None:
    """A checkpoint has the state of its own step, not of the one that was computed while it was written."""
    tree: Any = everystep.load(path)
    stored = {f"model.{name}": array_digest(tensor) for name, tensor in tree["model"].items()}
    for name, entries in tree["optimizer"]["state"].items():
        stored.update({f"optimizer.{name}.{key}": array_digest(value) for key, value in entries.items()})
    assert stored == {name: value for name, value in expected.items() if name not in ("own", "plain", "data")}


def _accumulating(folder: str, kind: Kind) -> Trained:
    return train(f"{folder}/{kind}", kind, 14, seed=4, every=2, keep=2, accumulate=3)


def _both(folder: str) -> list[Trained]:
    return [_accumulating(folder, "ddp"), _accumulating(folder, "fsdp2")]


@pytest.mark.timeout(300)
def test_saves_of_every_second_step_write_over_the_files_of_retired_ones(tmp_path: Path) -> None:
    ranks = values(launch(2, _both, str(tmp_path), timeout=240.0))
    for rank, found in enumerate(ranks):
        for kind, trained in zip(("ddp", "fsdp2"), found, strict=True):
            assert [saved.step for saved in trained.saved] == [2, 4, 6, 8, 10, 12, 14]
            assert trained.failed == trained.warnings == ()
            assert list_steps(str(tmp_path / kind)) == [12, 14]
            # Two stay, one is retired, one is waiting to be a spare: after that nothing is created.
            assert 1 <= len(trained.created) <= 4, (rank, kind, trained.created)
            for step in (12, 14):
                _check_stored(tmp_path / kind / step_name(step), trained.digests[step])
