"""An event loop whose time jumps to the next timer, and a scripted server inside httpx: whole runs in no time."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from loadtest.config import Limits, Target

TARGET = Target(base_url="http://server/v1", model="m", api_key=None, timeout_s=1000.0)


T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: what would have been waited for is added to the time instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen again"
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the server answers: (pause before it, bytes of it) for each piece of the body."""

    pieces: Sequence[tuple[float, bytes]]
    status: int = 200
    content_type: str = "text/event-stream"
    head_after_s: float = 0.0
    retry_after: str | None = None
    breaks: bool = False
    """The connection is lost after the last piece."""


class _Body(httpx.AsyncByteStream):
    def __init__(self, script: Script, on_end: Callable[[], None]) -> None:
        self._script = script
        self._on_end = on_end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for pause_s, data in self._script.pieces:
            await asyncio.sleep(pause_s)
            yield data
        if self._script.breaks:
            raise httpx.ReadError("connection lost")
        self._on_end()


class ScriptedServer(httpx.AsyncBaseTransport):
    """Answers with what `script` makes of a request's fields; keeps the fields of all requests."""

    def __init__(self, script: Callable[[dict[str, Any]], Script]) -> None:
        self._script = script
        self.requests: list[dict[str, Any]] = []
        self.bodies_read = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        fields: dict[str, Any] = json.loads(await request.aread())
        self.requests.append(fields)
        script = self._script(fields)
        await asyncio.sleep(script.head_after_s)
        headers = {"content-type": script.content_type}
        if script.retry_after is not None:
            headers["retry-after"] = script.retry_after
        return httpx.Response(
            script.status, headers=headers, stream=_Body(script, self._count_body)
        )

    def _count_body(self) -> None:
        self.bodies_read += 1


class Unreachable(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")


class Whole(httpx.AsyncByteStream):
    """A body that is there at once."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


def client(server: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=server, base_url="http://server/v1/")


def limits(max_requests: int = 100, duration_s: float = 1000.0, warmup_s: float = 0.0) -> Limits:
    return Limits(max_requests=max_requests, duration_s=duration_s, warmup_s=warmup_s)


def frame(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text_frame(text: str) -> bytes:
    return frame({"choices": [{"index": 0, "delta": {"content": text}}]})


def steady(
    *, ttft_s: float, itl_s: float, num_chunks: int, tokens_per_chunk: int = 1, prompt: int = 7
) -> Script:
    """First chunk after `ttft_s`, then one every `itl_s`; then the end, at once."""
    usage = {"prompt_tokens": prompt, "completion_tokens": num_chunks * tokens_per_chunk}
    end = (
        frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        + frame({"choices": [], "usage": usage})
        + b"data: [DONE]\n\n"
    )
    chunks = [(itl_s if index else ttft_s, text_frame("x ")) for index in range(num_chunks)]
    return Script(pieces=[*chunks, (0.0, end)])
