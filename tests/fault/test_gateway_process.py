"""The server as a process: what a shell or a supervisor sees of it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.conformance.live import chat_body

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncGenerator, AsyncIterator

RUN = """
import sys
from dataclasses import replace
from engine.fake import FakeScript
from gateway.config import ServeOptions, load_config
from gateway.server import run_server
config = load_config(ServeOptions(port={port}, drain_s={drain_s}))
script = FakeScript(load_s={load_s}, load_error={load_error!r}, decode_s=0.01)
config = replace(config, scheduler=replace(config.scheduler, scripted=script))
sys.exit(run_server(config, "test"))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def server_process(
    port: int, *, load_s: float = 0.0, load_error: str | None = None, drain_s: float = 10.0
) -> AsyncGenerator[Process]:
    code = RUN.format(port=port, load_s=load_s, load_error=load_error, drain_s=drain_s)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def text_until(process: Process, words: str) -> str:
    assert process.stderr is not None
    text = ""
    while words not in text:
        line = await process.stderr.readline()
        assert line, text
        text += line.decode()
    return text


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_as_soon_as_it_is_ready_drains_too(sig: signal.Signals) -> None:
    async with server_process(free_port()) as process, asyncio.timeout(15):
        text = await text_until(process, "ready in")
        process.send_signal(sig)
        assert process.stderr is not None
        text += (await process.stderr.read()).decode()
        assert await process.wait() == 0, text
        assert "stopping: running requests" in text


async def test_a_process_serves_drains_and_ends_with_0() -> None:
    port = free_port()
    async with server_process(port) as process, asyncio.timeout(15):
        text = await text_until(process, "ready in")
        assert f"http://127.0.0.1:{port}/v1" in text
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
            body = chat_body(stream=True, max_tokens=60, ignore_eos=True, model="default")
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.aiter_lines()
                raw = await anext(lines)
                process.send_signal(signal.SIGTERM)
                raw += "\n".join([line async for line in lines])
        assert '"finish_reason":"length"' in raw
        assert raw.endswith("data: [DONE]\n")
        assert await process.wait() == 0


ENDLESS = chat_body(stream=True, max_tokens=4000, ignore_eos=True, model="default")


@asynccontextmanager
async def running_stream(client: httpx.AsyncClient) -> AsyncGenerator[AsyncIterator[str]]:
    """Lines of a stream that has begun and does not end by itself for long."""
    async with client.stream("POST", "/v1/chat/completions", json=ENDLESS) as response:
        lines = response.aiter_lines()
        await anext(lines)
        yield lines


async def test_while_it_drains_others_are_sent_away_and_told_when_to_come() -> None:
    port = free_port()
    async with (
        server_process(port) as process,
        asyncio.timeout(20),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client,
    ):
        await text_until(process, "ready in")
        async with running_stream(client):
            process.send_signal(signal.SIGTERM)
            await text_until(process, "stopping")
            refused = await client.post("/v1/chat/completions", json=ENDLESS)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert 1 <= int(refused.headers["retry-after"]) <= 10
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
        # Who was left has gone: nothing keeps the server.
        assert await process.wait() == 0


async def test_what_runs_beyond_the_deadline_of_a_drain_ends_with_an_error_event() -> None:
    port = free_port()
    async with (
        server_process(port, drain_s=0.5) as process,
        asyncio.timeout(20),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client,
    ):
        await text_until(process, "ready in")
        async with running_stream(client) as lines:
            process.send_signal(signal.SIGTERM)
            text = "\n".join([line async for line in lines])
        *_, error, done = text.strip().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
        assert '"finish_reason":"' not in text
        assert await process.wait() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_aborts(second: signal.Signals) -> None:
    port = free_port()
    async with (
        server_process(port, drain_s=60.0) as process,
        asyncio.timeout(20),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client,
    ):
        await text_until(process, "ready in")
        async with running_stream(client) as lines:
            process.send_signal(signal.SIGTERM)
            await text_until(process, "stopping")
            process.send_signal(second)
            text = ""
            # Frames that still leave say so; the connection may as well just break.
            with suppress(httpx.RemoteProtocolError):
                async for line in lines:
                    text += f"{line}\n"
            assert '"finish_reason":"' not in text
            assert "[DONE]" not in text or '"code":"draining"' in text
        # Long before the drain's deadline.
        assert await process.wait() == 128 + second


async def test_a_signal_while_loading_ends_the_process() -> None:
    async with server_process(free_port(), load_s=30.0) as process, asyncio.timeout(15):
        await asyncio.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() in (128 + signal.SIGTERM, -signal.SIGTERM)


async def test_a_model_that_cannot_be_loaded_exits_2_with_the_reason() -> None:
    async with (
        server_process(free_port(), load_error="tensor x is missing") as process,
        asyncio.timeout(15),
    ):
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert "tensor x is missing" in errors.decode()
        assert "Traceback" not in errors.decode()


async def test_a_taken_port_exits_2_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with server_process(port, load_s=60.0) as process, asyncio.timeout(15):
            _, errors = await process.communicate()
        assert process.returncode == 2
        assert f"--port {port}" in errors.decode()


@pytest.mark.parametrize("arguments", [["serve", "/nonexistent"], ["serve", "--spec", "0"]])
async def test_the_command_line_exits_2(arguments: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(15):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert "Traceback" not in errors.decode()
