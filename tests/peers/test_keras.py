"""Keras for real: the files that it writes hold the weights and the optimizer's variables that it had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import universal
from support.processes import peers

pytest.importorskip("h5py")

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def written(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("keras")
    peers.run("keras", Path(__file__).with_name("keras_models.py"), folder, request.param)
    (folder / request.param).touch()
    return folder


def arrays(path: Path, prefix: str) -> list[bytes]:
    with everystep.open(path) as checkpoint:
        names = [name for name in checkpoint if name.startswith(prefix)]
        return sorted(np.asarray(checkpoint[name][...]).tobytes() for name in names)


@pytest.mark.parametrize(
    ("file", "kind"), [("m.keras", "Keras 3"), ("m.weights.h5", "Keras 3"), ("m.h5", "Keras 2")]
)
def test_files_of_keras_hold_the_weights_that_it_had(written: Path, file: str, kind: str) -> None:
    if file == "m.h5" and (written / "bfloat16").exists():  # the old format does not say what the bytes mean
        with pytest.raises(everystep.errors.UnsupportedSource, match=r"'model_weights/dense_1/.*\|V2"):
            universal.describe(written / file)
        return
    source = universal.describe(written / file)
    assert (source.kind, source.facts["format"]) == ("hdf5", kind)
    truth = np.load(written / "weights.npz")
    assert arrays(written / file, "model.") == sorted(truth[name].tobytes() for name in truth)


def test_saved_models_hold_the_variables_of_the_optimizer(written: Path) -> None:
    truth = np.load(written / "optimizer.npz")
    files = ["m.keras"] if (written / "bfloat16").exists() else ["m.keras", "m.h5"]
    for file in files:
        assert arrays(written / file, "optimizer.") == sorted(truth[name].tobytes() for name in truth)
    assert universal.describe(written / "m.keras").step == 2
