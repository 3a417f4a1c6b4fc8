"""One thread: with more than two, scikit-learn itself adds in an order that changes from run to run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    pytest.importorskip("sklearn")
    with threadpoolctl.threadpool_limits(limits=1):
        yield
