"""The command must look the same in every developer's terminal."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_terminal_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TERMINAL_WIDTH"):
        monkeypatch.delenv(name, raising=False)
