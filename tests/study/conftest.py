"""What the tests of the study share: a tiny state, and respect for others on the same machine."""

from __future__ import annotations

import gc
import os

import pytest

from everystep_study.harness import cache
from everystep_study.mechanisms import states


@pytest.fixture(autouse=True)
def _leave_the_rest_of_the_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_drop_everything", lambda: False)
    # A sync of all filesystems waits for what everybody else is writing.
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture(autouse=True)
def _collect_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch loaded a collection takes a third of a second, and there is one before every measurement."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture(scope="session")
def tiny() -> states.State:
    return states.build("gpt2", 2 << 20)
