"""What the envelope says when nobody else can, and bodies that do not come."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from gateway.errors import BodyStalled, reply_for
from gateway.middleware import BodyLimit, Envelope

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


async def read_body(parts: list[Message], timeout_s: float) -> Message:
    """What an application behind the limit receives last; when the parts are used up nothing more comes."""
    left = iter(parts)
    last: list[Message] = []

    async def receive() -> Message:
        for part in left:
            return part
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        last.extend([await receive() for _ in range(len(parts) + 1)])

    async def send(message: Message) -> None:
        raise AssertionError

    limit = BodyLimit(app, limit_bytes=100, timeout_s=timeout_s)
    await limit({"type": "http", "headers": []}, receive, send)
    return last[-1]


async def test_a_body_that_stalls_is_refused_and_a_whole_one_may_be_answered_for_long() -> None:
    begun: Message = {"type": "http.request", "body": b"{", "more_body": True}
    with pytest.raises(BodyStalled, match="0.001 s") as refusal:
        await read_body([begun], timeout_s=0.001)
    reply = reply_for(refusal.value)
    assert (reply.status, reply.code) == (408, "body_timeout")
    ended: Message = {"type": "http.request", "body": b"}", "more_body": False}
    assert await read_body([begun, ended], timeout_s=0.001) == {"type": "http.disconnect"}
