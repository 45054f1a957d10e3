"""A tab of a headless Chromium on the page of a live server, and the few things that every test does in it."""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import (
    ConsoleMessage,
    Locator,
    Page,
    Request,
    async_playwright,
    expect,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

expect.set_options(timeout=20_000)

WIDE = (1280, 850)
NARROW = (360, 740)

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_WATCH_POLICY = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@dataclass(
    kw_only=True
)  # no slots: Playwright keeps its wrappers of bound handlers on their object
class Tab:
    """The page, and what happened in it."""

    page: Page
    problems: list[str] = field(default_factory=list[str])
    """Uncaught errors, and errors on the console but for answers with an error status."""
    urls: list[str] = field(default_factory=list[str])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of the chat requests."""

    @property
    def answer(self) -> Locator:
        """The last one."""
        return self.page.locator(".turn.assistant").last

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    async def send(self, text: str) -> None:
        await self.page.get_by_label("Message").fill(text)
        await self.page.keyboard.press("Enter")

    async def set(self, **values: str) -> None:
        """Fill fields of the settings by name."""
        await self.page.locator("#show-settings").click()
        for name, value in values.items():
            place = self.page.locator(f"#settings [name={name}]")
            if name == "enable_thinking":
                await place.select_option(value)
            else:
                await place.fill(value)
        await self.button("Done").click()

    async def is_too_wide(self) -> bool:
        """Whether the page scrolls sideways."""
        return await self.page.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )

    def note_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and "the server responded with a status" not in message.text:
            self.problems.append(message.text)

    def note_request(self, request: Request) -> None:
        self.urls.append(request.url)
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(request.post_data_json or {})


@asynccontextmanager
async def open_tab(
    url: str, *, size: tuple[int, int] = WIDE, dark: bool = False, path: str = "/"
) -> AsyncGenerator[Tab]:
    """A fresh browser on the page; leaving checks that the page had no error of its own and broke no policy."""
    chromium = next(filter(None, map(shutil.which, _NAMES)), None)
    if chromium is None:
        # Only who asks for the browser's tests comes here, so nothing was tested is a failure.
        pytest.fail(f"needs Chromium: none of {', '.join(_NAMES)} is installed")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        try:
            page = await browser.new_page(
                viewport={"width": size[0], "height": size[1]},
                color_scheme="dark" if dark else "light",
            )
            tab = Tab(page=page)
            page.set_default_timeout(15_000)
            page.on("console", tab.note_console)
            page.on("pageerror", lambda error: tab.problems.append(str(error)))
            page.on("request", tab.note_request)
            await page.add_init_script(_WATCH_POLICY)
            await page.goto(url + path)
            yield tab
            assert await page.evaluate("window.violations") == []
            assert tab.problems == []
        finally:
            await browser.close()
