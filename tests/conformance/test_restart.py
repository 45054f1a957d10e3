"""`stratagate serve` with a directory for conversations: the next turn after a restart reads only what is new."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.timeout(120)

SYSTEM = "You are a patient teacher of arithmetic and of little else. " * 8
KEYS = "ann:sk-ann-secret\nbob:sk-bob-secret\n"


@asynccontextmanager
async def server(*options: str) -> AsyncGenerator[str]:
    """A server process, stopped by SIGTERM on leaving."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ("-m", "gateway", "serve", "--port", str(port), "--threads", "1", "--device", "cpu")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *options, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(90):
        while b"ready in" not in (line := await process.stderr.readline()):
            assert line, "the server ended before it was ready"
    drain = asyncio.create_task(process.stderr.read())
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        await drain
        assert await process.wait() == 0


async def ask(url: str, messages: list[dict[str, str]], key: str) -> tuple[str, int, int]:
    """(answer, cached tokens, prompt tokens)."""
    body = {"model": "default", "messages": messages, "max_tokens": 12, "temperature": 0}
    async with httpx.AsyncClient(timeout=60.0) as client:
        headers = {"Authorization": f"Bearer {key}"}
        reply = await client.post(f"{url}/chat/completions", json=body, headers=headers)
    found = reply.json()
    usage = found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached, usage["prompt_tokens"]


async def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    keys, directory = tmp_path / "keys", tmp_path / "parked"
    keys.write_text(KEYS, encoding="utf-8")
    options = ("--conversation-cache-dir", str(directory), "--api-key-file", str(keys))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 2+2?"}]
    async with server(*options) as url:
        answer, cached, first_tokens = await ask(url, messages, "sk-ann-secret")
    assert cached == 0
    (file,) = directory.glob("*.parked")
    assert b"sk-ann" not in file.read_bytes()
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And 3+3?"},
    ]
    async with server(*options) as url:
        assert (await ask(url, messages, "sk-bob-secret"))[1] == 0
        answer, cached, _ = await ask(url, messages, "sk-ann-secret")
        assert cached > first_tokens - 10
        # The same again, from memory: the same text.
        assert (await ask(url, messages, "sk-ann-secret"))[0] == answer
