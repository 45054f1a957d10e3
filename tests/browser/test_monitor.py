"""The monitor view: numbers of a busy scripted server, and of the shipped model from end to end."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from playwright.async_api import expect

from tests.browser.tab import open_tab
from tests.browser.test_chat import COUNTING
from tests.conformance.live import chat_body, live_server, says

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


async def test_it_shows_what_a_busy_server_does() -> None:
    script = says(COUNTING * 30, decode_s=0.05)
    async with live_server(script) as live, open_tab(live.url, path="/#monitor") as tab:
        page = tab.page
        await expect(page.locator("#busy")).to_have_text("0 of 4")
        async with asyncio.TaskGroup() as group:
            requests = [
                group.create_task(live.client.post("/v1/chat/completions", json=chat_body()))
                for _ in range(6)
            ]
            await expect(page.locator("#busy")).to_have_text("4 of 4")
            await expect(page.locator("#queue")).to_have_text("2")
            await expect(page.locator("#slots .phase.decoding")).to_have_count(4)
            await expect(page.locator("#rate")).to_have_text(re.compile(r"^[1-9]\d*(\.\d)?$"))
            await expect(page.locator("#acceptance")).to_have_text(re.compile(r"^\d+ %$"))
            await expect(page.locator("#drafts tbody tr")).to_have_count(4)
            await expect(page.locator("#drafts tbody tr").first).to_contain_text("%")
            await expect(page.locator("#history polyline")).to_have_count(1)
            await expect(page.locator("#requests")).to_contain_text("admitted")
            await expect(page.locator("#store")).to_contain_text("of 8,192 MiB")
            await expect(page.locator("#facts")).to_contain_text("scripted")
            for request in requests:
                request.cancel()
        await expect(page.locator("#busy")).to_have_text("0 of 4")


async def test_a_lost_server_is_said_so_and_found_again() -> None:
    async with live_server() as live, open_tab(live.url, path="/#monitor") as tab:
        await expect(tab.page.locator("#busy")).to_have_text("0 of 4")
        await tab.page.route("**/v1/status", lambda route: route.abort())
        await expect(tab.page.locator("#trouble")).to_contain_text("no connection")
        await tab.page.unroute("**/v1/status")
        await expect(tab.page.locator("#trouble")).to_be_hidden()
        tab.problems.clear()  # the browser itself notes the lost connection


async def test_colours_follow_the_system() -> None:
    async with live_server() as live:
        backgrounds: list[str] = []
        for dark in (False, True):
            async with open_tab(live.url, path="/#monitor", dark=dark) as tab:
                backgrounds.append(
                    await tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
                )
    assert len(set(backgrounds)) == 2


async def test_the_shipped_model_answers_and_its_memory_is_shown() -> None:
    async with shipped_server() as url, open_tab(url) as tab:
        tab.page.set_default_timeout(60_000)
        await tab.set(max_tokens="40", temperature="0")
        await tab.send("What is the capital of France?")
        await expect(tab.answer.locator(".hint")).to_contain_text("tokens", timeout=60_000)
        assert await tab.answer.locator(".prose").last.inner_text()
        await tab.page.get_by_role("link", name="Monitor").click()
        await expect(tab.page.locator("#memory .total")).to_contain_text("total")
        total = await tab.page.locator("#memory .total .number").first.inner_text()
        assert float(total.replace(",", "")) > 10
        await expect(tab.page.locator("#facts")).to_contain_text("default")
        await expect(tab.page.locator("#acceptance")).to_have_text(re.compile(r"^\d+ %$"))


@asynccontextmanager
async def shipped_server() -> AsyncGenerator[str]:
    """`serve` with its defaults but the port, as a process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        "serve",
        "--port",
        str(port),
        stderr=asyncio.subprocess.PIPE,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(60):
            while not await _is_ready(client, url):
                assert process.returncode is None, "the server ended"
                await asyncio.sleep(0.2)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == 200
    except httpx.TransportError:
        return False
