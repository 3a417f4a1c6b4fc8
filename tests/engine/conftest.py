"""The backends every engine test runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystep.engine import BACKENDS, Backend, capabilities, choose_backend
from everystep.errors import EngineUnavailable


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for many files; hypothesis examples share it and name their own."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, folder: Path) -> Backend:
    """Each backend in turn. One that the probe says cannot work here must also be refused when forced."""
    name: Backend = request.param
    able = capabilities(folder)
    reason = able.uring_reason if name == "uring" and not able.uring else able.direct_reason
    if name != "buffered" and (not able.direct or (name == "uring" and not able.uring)):
        with pytest.raises(EngineUnavailable):
            choose_backend(folder, name)
        pytest.skip(f"the probe says {name} cannot work here: {reason}")
    return name
