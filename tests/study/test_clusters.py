"""The clusters suite: every way to write a checkpoint is measured, and what is promised is judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from rich.console import Console

from everystep_study.harness import runner
from everystep_study.report import pages, writers
from everystep_study.suites import clusters
from everystep_study.suites.clusters import ClustersSuite


def small(**options: object) -> ClustersSuite:
    usual = {"rows": 60, "rounds": 3, "fit_rounds": 3, "mixture_rounds": 3, "ks": (2,), "mixture_ks": (2,)}
    return ClustersSuite(**{**usual, "megabytes": (1, 2), **options})  # type: ignore[arg-type]


def test_everything_is_measured_shown_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "MNIST_LIKE", (60, 100))
    monkeypatch.setattr(clusters, "MUSICNET_LIKE", (60, 12))
    suite = small()
    result = runner.run(suite, tmp_path, Console(quiet=True), check=True)
    assert {row.status for row in result.rows} == {"measured"}, [row for row in result.rows if row.reason]
    assert {row.case for row in result.section("KMeans, memory")} == {
        *("shelf", "floor"),
        *clusters.WRITERS,
        *(f"{name}-durable" for name in clusters.WRITERS),
    }
    shares = [row.median("share") for row in result.section("fit") if row.case == "shelf"]
    assert all(share is not None and 0 < share < 1 for share in shares)
    keys = {bar.key for bar in result.bars}
    assert {"KMeans, memory-savez", "KMeans, disk-compressed", "mixture, disk-savez", "size"} <= keys
    assert all(bar.verdict != "not measured" for bar in result.bars)
    page = writers.markdown(pages.benchmarks([(suite, result)], "everystep bench --clusters"))
    assert "np.savez_compressed" in page
    assert "one sync, ms" in page
    assert list(tmp_path.iterdir()) == []


def test_data_is_that_of_the_file(tmp_path: Path) -> None:
    images = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    np.save(tmp_path / "x.npy", images)
    np.savez(tmp_path / "x.npz", images)
    for name in ("x.npy", "x.npz"):
        found = clusters.load(tmp_path / name)
        assert found.dtype == np.float64
        assert np.array_equal(found, images.reshape(5, 12))
    with pytest.raises(ValueError, match="no file"):
        small(data=tmp_path / "absent").needs()


def test_synthetic_data_has_the_shape_and_rank_of_mnist() -> None:
    data = clusters.synthetic(800, 784, 67)
    assert data.shape == (800, 784)
    assert np.linalg.matrix_rank(data) == 717


def test_states_have_the_promised_sizes() -> None:
    data = clusters.synthetic(500, 784, 67)
    assert [clusters.kmeans_state(data, k)["centers"].nbytes for k in (2, 10)] == [12_544, 62_720]
    nbytes = [sum(a.nbytes for a in clusters.mixture_state(data, k).values()) for k in (2, 10)]
    assert 4.9e6 < nbytes[0] < 5e6
    assert 24e6 < nbytes[1] < 25e6
