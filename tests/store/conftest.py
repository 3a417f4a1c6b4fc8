"""Ways to write a checkpoint, one for each path through the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import everystep
from everystep.engine import BACKENDS, Backend, capabilities, choose_backend


@pytest.fixture(params=[*BACKENDS, "small"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> everystep.Options:
    """Every backend with windows far smaller than the data, and the one-write path of small files."""
    if request.param == "small":
        return everystep.Options(small_nbytes=1 << 30)
    backend: Backend = request.param
    able = capabilities(tmp_path)
    if backend != "buffered" and (not able.direct or (backend == "uring" and not able.uring)):
        with pytest.raises(everystep.errors.EngineUnavailable):
            choose_backend(tmp_path, backend)
        pytest.skip(f"the probe says {backend} cannot work here")
    return everystep.Options(backend=backend, memory_nbytes=512 << 10, small_nbytes=0)
