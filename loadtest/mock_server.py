"""A server that answers after a known time and writes at a known pace, to calibrate load generators with.

`python -m loadtest.mock_server --port 9999 --ttft-ms 50 --itl-ms 10`. Every request gets max_tokens chunks of one
token. Each chunk has its own due time, so that sleeps which end late do not add up. A timer of a busy machine is late
all the same, so the server keeps when it really sent what: GET /served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is known in advance."""

    ttft_s: float
    itl_s: float
    tokens_per_chunk: int = 1


def build_app(pace: Pace) -> Starlette:
    """Chat completions, streamed or whole, /models, /health, and /served: [arrival, chunk, chunk, ...] of each stream.

    All times are of time.monotonic, which processes of one machine share.
    """
    served: list[list[float]] = []

    async def chat(request: Request) -> Response:
        arrived_s = time.monotonic()
        fields: dict[str, Any] = orjson.loads(await request.body())
        num_tokens = int(fields.get("max_tokens") or 16)
        usage = {
            "prompt_tokens": sum(len(m["content"].split()) for m in fields["messages"]),
            "completion_tokens": num_tokens,
        }
        num_chunks = -(-num_tokens // pace.tokens_per_chunk)
        if fields.get("stream"):
            sent_s = [arrived_s]
            served.append(sent_s)
            chunks = _stream(pace, sent_s, num_chunks, usage)
            return StreamingResponse(chunks, media_type="text/event-stream")
        await _sleep_until(arrived_s + pace.ttft_s + pace.itl_s * (num_chunks - 1))
        message = {"role": "assistant", "content": "word " * num_tokens}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return JSONResponse({"object": "chat.completion", "choices": [choice], "usage": usage})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "default", "object": "model"}]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def show_served(request: Request) -> Response:
        return JSONResponse(served)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/served", show_served),
        ]
    )


async def _stream(
    pace: Pace, sent_s: list[float], num_chunks: int, usage: dict[str, int]
) -> AsyncIterator[bytes]:
    """Appends to `sent_s`, which begins with the arrival, when each chunk went out."""
    first_due_s = sent_s[0] + pace.ttft_s
    for index in range(num_chunks):
        await _sleep_until(first_due_s + pace.itl_s * index)
        sent_s.append(time.monotonic())
        yield _frame([{"index": 0, "delta": {"content": "word " * pace.tokens_per_chunk}}])
    yield _frame([{"index": 0, "delta": {}, "finish_reason": "length"}])
    yield _frame([], usage)
    yield b"data: [DONE]\n\n"


def _frame(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
    chunk = {"object": "chat.completion.chunk", "choices": choices, "usage": usage}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


async def _sleep_until(due_s: float) -> None:
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def main(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9999,
    ttft_ms: Annotated[float, typer.Option(min=0)] = 50.0,
    itl_ms: Annotated[float, typer.Option(min=0)] = 10.0,
    tokens_per_chunk: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Serve on 127.0.0.1 until interrupted."""
    pace = Pace(ttft_s=ttft_ms / 1000, itl_s=itl_ms / 1000, tokens_per_chunk=tokens_per_chunk)
    # Not uvloop: its timers are whole milliseconds.
    uvicorn.run(build_app(pace), host="127.0.0.1", port=port, log_level="warning", loop="asyncio")


if __name__ == "__main__":
    typer.run(main)
