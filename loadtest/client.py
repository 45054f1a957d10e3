"""One request over HTTP: sends a body, stamps every chunk of the answer, and says how it ended.

All times are the event loop's, in seconds, so that a loop with a clock of its own (a test's) needs nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import httpx

_MAX_ERROR_CHARS = 300
_MAX_LINE_BYTES = 8 << 20


class Outcome(StrEnum):
    """How a request ended. Every request has exactly one."""

    OK = "ok"
    HTTP_ERROR = "http_error"
    """The server answered with a status other than 200."""
    STREAM_ERROR = "stream_error"
    """An error event in the stream, or a stream that broke off."""
    DISCONNECTED = "disconnected"
    """We left, as planned."""
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    """An answer that is not what the protocol says."""
    CONNECTION = "connection"
    """No answer at all: refused, reset, or closed before a status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """A request to send and how its client behaves."""

    body: bytes
    kind: str = "chat"
    """A label for the report."""
    path: str = "/chat/completions"
    stream: bool = True
    expected: tuple[str, ...] = (Outcome.OK,)
    """Outcomes that are right; an HTTP error is named with its status, `http_error 400`."""
    disconnect_after_chunks: int | None = None
    """Leave after so many chunks; 0 leaves as soon as the answer's head is there."""
    read_delay_s: float = 0.0
    """Sleep before each read: a slow reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What happened to one request."""

    kind: str
    intended_start_s: float
    """When it should have started; latencies count from here, so that a late client hides nothing."""
    start_s: float
    end_s: float
    chunk_times_s: tuple[float, ...]
    """Arrivals of chunks that carry text, reasoning or tool calls."""
    outcome: Outcome
    expected: bool
    status: int | None = None
    error: str = ""
    retry_after: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""

    @property
    def label(self) -> str:
        """The outcome, and for an HTTP error its status."""
        return outcome_label(self.outcome, self.status)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.chunk_times_s[0] - self.intended_start_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_start_s

    @property
    def late_s(self) -> float:
        """How far the load generator itself fell behind."""
        return self.start_s - self.intended_start_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between one chunk and the next; a chunk of a draft chain carries several tokens."""
        times = self.chunk_times_s
        return tuple(later - earlier for earlier, later in zip(times, times[1:], strict=False))

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk arrived."""
        tokens = self.completion_tokens
        if tokens is None or tokens < 2 or len(self.chunk_times_s) < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (tokens - 1)

    @property
    def usage_agrees(self) -> bool | None:
        """Whether usage can be true: a chunk holds at least one token. None without a whole stream."""
        if self.outcome is not Outcome.OK or not self.chunk_times_s:
            return None
        return (
            self.completion_tokens is not None and len(self.chunk_times_s) <= self.completion_tokens
        )


def outcome_label(outcome: Outcome, status: int | None) -> str:
    return f"{outcome} {status}" if outcome is Outcome.HTTP_ERROR else str(outcome)


class ProtocolError(Exception):
    """The answer is not what OpenAI's protocol says."""


class ServerError(Exception):
    """An error event inside a stream, or a stream that ended too early."""


class _Left(Exception):
    """We close the connection on purpose."""


@dataclass(slots=True)
class _Answer:
    """What was read so far."""

    status: int | None = None
    retry_after: str | None = None
    chunk_times_s: list[float] = field(default_factory=list[float])
    texts: list[str] = field(default_factory=list[str])
    finish_reason: str | None = None
    done_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


async def send(
    http: httpx.AsyncClient, plan: RequestPlan, *, intended_start_s: float, timeout_s: float
) -> RequestRecord:
    """Send one request and read its answer to the end that its plan wants.

    Never raises for what a server does; cancellation closes the connection and goes on up.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    answer = _Answer()
    outcome = Outcome.OK
    try:
        async with asyncio.timeout(timeout_s):
            await _exchange(http, plan, answer)
        if answer.status != 200:
            outcome = Outcome.HTTP_ERROR
    except _Left:
        outcome = Outcome.DISCONNECTED
    except (TimeoutError, httpx.TimeoutException):
        outcome, answer.error = Outcome.TIMEOUT, f"not finished after {timeout_s:g} s"
    except ProtocolError as error:
        outcome, answer.error = Outcome.MALFORMED, str(error)
    except ServerError as error:
        outcome, answer.error = Outcome.STREAM_ERROR, str(error)
    except httpx.HTTPError as error:
        outcome = Outcome.CONNECTION if answer.status is None else Outcome.STREAM_ERROR
        answer.error = f"{type(error).__name__}: {error}"
    end_s = loop.time() if answer.done_s is None else answer.done_s
    return _record(plan, answer, outcome, (intended_start_s, start_s, end_s))


def _record(
    plan: RequestPlan, answer: _Answer, outcome: Outcome, times_s: tuple[float, float, float]
) -> RequestRecord:
    details: dict[str, Any] = answer.usage.get("prompt_tokens_details") or {}
    intended_start_s, start_s, end_s = times_s
    return RequestRecord(
        kind=plan.kind,
        intended_start_s=intended_start_s,
        start_s=start_s,
        end_s=end_s,
        chunk_times_s=tuple(answer.chunk_times_s),
        outcome=outcome,
        expected=outcome_label(outcome, answer.status) in plan.expected,
        status=answer.status,
        error=answer.error[:_MAX_ERROR_CHARS],
        retry_after=answer.retry_after,
        prompt_tokens=answer.usage.get("prompt_tokens"),
        completion_tokens=answer.usage.get("completion_tokens"),
        cached_tokens=details.get("cached_tokens"),
        finish_reason=answer.finish_reason,
        text="".join(answer.texts),
    )


async def _exchange(http: httpx.AsyncClient, plan: RequestPlan, answer: _Answer) -> None:
    request = http.build_request(
        "POST",
        plan.path.lstrip("/"),
        content=plan.body,
        headers={"content-type": "application/json"},
    )
    response = await http.send(request, stream=True)
    try:
        answer.status = response.status_code
        answer.retry_after = response.headers.get("retry-after")
        if response.status_code != 200:
            answer.error = (await response.aread()).decode("utf-8", "replace")
        elif plan.stream:
            await _read_stream(response, plan, answer)
        else:
            _read_whole(await response.aread(), answer)
    finally:
        await response.aclose()


def _read_whole(body: bytes, answer: _Answer) -> None:
    payload = _parse(body)
    _take_chunk(payload, answer)
    if not answer.usage:
        raise ProtocolError("an answer without usage")
    answer.chunk_times_s.clear()  # one piece: no first token to speak of


async def _read_stream(response: httpx.Response, plan: RequestPlan, answer: _Answer) -> None:
    content_type = response.headers.get("content-type", "")
    if not content_type.startswith("text/event-stream"):
        raise ProtocolError(f"a stream of type {content_type!r}")
    if plan.disconnect_after_chunks == 0:
        raise _Left
    # Read past [DONE] to the end of the body: only then can the connection carry the next request.
    async for data in _events(response, plan.read_delay_s):
        if answer.done_s is not None:
            raise ProtocolError("an event after [DONE]")
        if data == b"[DONE]":
            if answer.finish_reason is None:
                raise ProtocolError("[DONE] before any finish_reason")
            answer.done_s = asyncio.get_running_loop().time()
            continue
        _take_chunk(_parse(data), answer)
        if plan.disconnect_after_chunks == len(answer.chunk_times_s):
            raise _Left
    if answer.done_s is None:
        raise ServerError("the stream ended without [DONE]")


async def _events(response: httpx.Response, read_delay_s: float) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Lines end in LF or CRLF; comments and other fields are skipped."""
    data: list[bytes] = []
    async for line in _lines(response, read_delay_s):
        if not line:
            if data:
                yield b"\n".join(data)
                data.clear()
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise ProtocolError(f"not a line of an event stream: {line[:80]!r}")


async def _lines(response: httpx.Response, read_delay_s: float) -> AsyncIterator[bytes]:
    rest = b""
    async for part in response.aiter_raw():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise ProtocolError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            yield line.removesuffix(b"\r")
        if read_delay_s:
            await asyncio.sleep(read_delay_s)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        payload: object = json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {data[:80]!r}") from error
    if not isinstance(payload, dict):
        raise ProtocolError(f"not an object: {data[:80]!r}")
    return cast("dict[str, Any]", payload)


def _take_chunk(payload: dict[str, Any], answer: _Answer) -> None:
    if payload.get("error"):
        raise ServerError(json.dumps(payload["error"]))
    if payload.get("usage"):
        answer.usage = payload["usage"]
    choices = payload.get("choices")
    if not isinstance(choices, list):
        raise ProtocolError("a chunk without choices")
    for choice in cast("list[dict[str, Any]]", choices):
        delta: dict[str, Any] = choice.get("delta") or choice.get("message") or choice
        text = delta.get("content") or delta.get("text") or ""
        if text or delta.get("reasoning_content") or delta.get("tool_calls"):
            answer.chunk_times_s.append(asyncio.get_running_loop().time())
            answer.texts.append(text)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
