"""Commits that run beside the next iteration: what they store, and how they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everystep.errors import SaveFailed

pytest.importorskip("sklearn")

from everystep.integrations.sklearn import KMeans
from everystep.integrations.sklearn.record import FitRecord

DATA = np.random.default_rng(0).normal(size=(300, 5))


def test_a_commit_has_the_arrays_as_they_were_when_it_was_asked_for(tmp_path: Path) -> None:
    record = FitRecord(tmp_path / "fit.shelf", "fit.")
    record.open({"data": "some"}, 1 << 20)
    centers = np.zeros(1000)
    for number in range(20):
        centers[:] = number
        record.commit_soon({"centers": centers, "place": number})
        centers[:] = -1
        assert (record.get("place"), set(record.get("centers"))) == (number, {number})
    record.close()


def test_a_commit_that_fails_beside_the_fit_ends_the_fit_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = FitRecord._commit, []

    def failing(self: FitRecord, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise SaveFailed("the device is gone")
        real(self, *args)

    monkeypatch.setattr(FitRecord, "_commit", failing)
    with pytest.raises(SaveFailed, match="the device is gone"):
        KMeans(4, random_state=0, n_init=1, shelf=tmp_path / "fit.shelf").fit(DATA)
    assert len(calls) == 3, "nothing is committed after a failure"
    monkeypatch.undo()
    resumed = KMeans(4, random_state=0, n_init=1, shelf=tmp_path / "fit.shelf").fit(DATA)
    assert np.array_equal(
        resumed.cluster_centers_, KMeans(4, random_state=0, n_init=1).fit(DATA).cluster_centers_
    )
