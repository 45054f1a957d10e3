"""What the envelope says when nobody else can, what it logs, and bodies that do not come."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING

import pytest

from gateway.errors import BodyStalled, reply_for
from gateway.json_log import JsonFormatter
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


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/a\nFAKE\r\x1b[31m", "/a%0AFAKE%0D%1B[31m"),
        ("/\0\x7f 200 0.001s", "/%00%7F%20200%200.001s"),
        ("/\x85\x9b\u2028\u202e", "/%C2%85%C2%9B%E2%80%A8%E2%80%AE"),
        ("/a%0a", "/a%250a"),
        ("/\ud800", "/?"),
    ],
)
async def test_no_path_can_forge_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, path: str, logged: str
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    with caplog.at_level(logging.INFO, "stratagate.access"):
        await Envelope(app)(scope, receive, send)
    (record,) = caplog.records
    text, line = record.getMessage(), JsonFormatter().format(record)
    assert text.isprintable() and text.startswith(f"GET {logged} 404 ")
    assert line.isprintable() and json.loads(line)["path"] == logged


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
