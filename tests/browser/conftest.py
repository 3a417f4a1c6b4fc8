"""A real Chromium, the system's, for tests that look at pages. `make browser` installs what they need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PICTURES = Path(os.environ.get("EVERYSTEP_PICTURES", "build/browser"))
"""Where tests leave pictures of what they saw, for people to look at."""


class Pages:
    """Opens pages, and fails if one of them complains or asks for anything that it should not."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(
        self,
        address: str | Path,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: str = "light",
        wait: bool = True,
    ) -> Any:
        context = self._chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=width < 500
        )
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address if isinstance(address, str) else address.as_uri())
        if wait:
            page.wait_for_selector("html[data-ready=true]")
        return page

    def forgive(self, *texts: str) -> None:
        """Complaints that hold one of these texts were to be expected."""
        self.complaints[:] = [it for it in self.complaints if not any(text in it for text in texts)]

    def picture(self, page: Any, name: str, *, full: bool = True) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        if full:
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(700)  # it scrolls smoothly
        page.screenshot(path=PICTURES / f"{name}.png", full_page=full)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="run `make browser`")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program is not None, "no chromium on this machine: run `make browser`"
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def pages(chromium: Any) -> Iterator[Pages]:
    opened = Pages(chromium)
    yield opened
    for context in list(chromium.contexts):
        context.close()
    assert opened.complaints == []
