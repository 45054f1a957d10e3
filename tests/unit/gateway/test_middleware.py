"""What the envelope says when nobody else can."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from gateway.middleware import Envelope

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send


async def test_a_request_that_is_never_whole_gets_503_when_the_server_ends() -> None:
    sent: list[Message] = []
    waiting = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        waiting.set()
        await receive()

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    task = asyncio.create_task(Envelope(app)(scope, never, send))
    await waiting.wait()
    task.cancel()
    await task
    start, body = sent
    headers = dict(start["headers"])
    assert start["status"] == 503
    assert headers[b"retry-after"] == b"1"
    assert b"x-request-id" in headers
    assert json.loads(body["body"])["error"]["code"] == "draining"
