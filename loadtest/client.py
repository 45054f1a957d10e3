"""One request over HTTP: sends a body, stamps every chunk of the answer, and says how it ended.

All times are the event loop's, in seconds, so that a loop with a clock of its own (a test's) needs nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict, cast

import httpx
import orjson

from loadtest.sse import EventDecoder, SseError

_MAX_ERROR_CHARS = 300


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
    """Labels that are right; an error is named with its status or code, `http_error 400`."""
    disconnect_after_chunks: int | None = None
    """Leave after so many chunks; 0 leaves as soon as the answer's head is there."""
    read_delay_s: float = 0.0
    """Sleep after each read: a slow reader."""
    max_tokens: int = 0
    """The most tokens the answer may have; bounds what a server may count for a client that left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What happened to one request."""

    kind: str
    intended_start_s: float
    """When it should have started; latencies count from here, so that a late client hides nothing."""
    start_s: float
    """When it began to connect or, on an open connection, to send."""
    end_s: float
    late_s: float = 0.0
    """How far the load generator itself fell behind: its own work before `start_s`, and what kept it from it."""
    chunk_times_s: tuple[float, ...]
    """Arrivals of chunks that carry text, reasoning or tool calls, taken before they are parsed."""
    outcome: Outcome
    expected: bool
    status: int | None = None
    error: str = ""
    error_code: str | None = None
    """What the server calls its error: the `code` of the error object, or its `type`."""
    retry_after: str | None = None
    max_tokens: int = 0
    prompt_tokens: int | None = None
    """The last that usage said; known also of a stream that was cut short, if its chunks carry usage."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    reasoning: str = ""

    @property
    def label(self) -> str:
        """The outcome, with the status of an HTTP error and the code of an error event."""
        return outcome_label(self.outcome, self.status, self.error_code)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.chunk_times_s[0] - self.intended_start_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_start_s

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


def outcome_label(outcome: Outcome, status: int | None, code: str | None) -> str:
    match outcome:
        case Outcome.HTTP_ERROR:
            return f"{outcome} {status}"
        case Outcome.STREAM_ERROR if code is not None:
            return f"{outcome} {code}"
        case _:
            return str(outcome)


class ProtocolError(Exception):
    """The answer is not what OpenAI's protocol says."""


class ServerError(Exception):
    """An error event inside a stream, or a stream that ended too early."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class _Left(Exception):
    """We close the connection on purpose."""


@dataclass(slots=True)
class _Answer:
    """What was read so far."""

    start_s: float | None = None
    status: int | None = None
    retry_after: str | None = None
    chunk_times_s: list[float] = field(default_factory=list[float])
    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    finish_reason: str | None = None
    done_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""
    error_code: str | None = None


async def send(
    http: httpx.AsyncClient,
    plan: RequestPlan,
    *,
    timeout_s: float,
    intended_start_s: float | None = None,
) -> RequestRecord:
    """Send one request and read its answer to the end that its plan wants.

    Without `intended_start_s` latencies count from the moment the request goes out: no plan was missed, and making
    the request ready is not the server's time.
    Never raises for what a server does; cancellation closes the connection and goes on up.
    """
    loop = asyncio.get_running_loop()
    called_s = loop.time()
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
    except (ProtocolError, SseError) as error:
        outcome, answer.error = Outcome.MALFORMED, str(error)
    except ServerError as error:
        outcome, answer.error, answer.error_code = Outcome.STREAM_ERROR, str(error), error.code
    except httpx.HTTPError as error:
        outcome = Outcome.CONNECTION if answer.status is None else Outcome.STREAM_ERROR
        answer.error = f"{type(error).__name__}: {error}"
    start_s = called_s if answer.start_s is None else answer.start_s
    times = _Times(
        intended_start_s=start_s if intended_start_s is None else intended_start_s,
        start_s=start_s,
        end_s=loop.time() if answer.done_s is None else answer.done_s,
        late_s=start_s - (called_s if intended_start_s is None else intended_start_s),
    )
    return _record(plan, answer, outcome, times)


class _Times(TypedDict):
    intended_start_s: float
    start_s: float
    end_s: float
    late_s: float


def _record(plan: RequestPlan, answer: _Answer, outcome: Outcome, times: _Times) -> RequestRecord:
    details: dict[str, Any] = answer.usage.get("prompt_tokens_details") or {}
    return RequestRecord(
        **times,
        kind=plan.kind,
        chunk_times_s=tuple(answer.chunk_times_s),
        outcome=outcome,
        expected=outcome_label(outcome, answer.status, answer.error_code) in plan.expected,
        status=answer.status,
        error=answer.error[:_MAX_ERROR_CHARS],
        error_code=answer.error_code,
        max_tokens=plan.max_tokens,
        retry_after=answer.retry_after,
        prompt_tokens=answer.usage.get("prompt_tokens"),
        completion_tokens=answer.usage.get("completion_tokens"),
        cached_tokens=details.get("cached_tokens"),
        finish_reason=answer.finish_reason,
        text="".join(answer.texts),
        reasoning="".join(answer.reasoning),
    )


async def _exchange(http: httpx.AsyncClient, plan: RequestPlan, answer: _Answer) -> None:
    loop = asyncio.get_running_loop()

    async def on_wire(event: str, details: dict[str, Any]) -> None:
        if answer.start_s is None:
            answer.start_s = loop.time()

    request = http.build_request(
        "POST",
        plan.path.lstrip("/"),
        content=plan.body,
        headers={"content-type": "application/json"},
        extensions={"trace": on_wire},
    )
    response = await http.send(request, stream=True)
    try:
        answer.status = response.status_code
        answer.retry_after = response.headers.get("retry-after")
        if response.status_code != 200:
            body = await response.aread()
            answer.error, answer.error_code = body.decode("utf-8", "replace"), _code_of(body)
        elif plan.stream:
            await _read_stream(response, plan, answer)
        else:
            _read_whole(await response.aread(), answer)
    finally:
        await response.aclose()


def _read_whole(body: bytes, answer: _Answer) -> None:
    _take_chunk(_parse(body), answer, asyncio.get_running_loop().time())
    if not answer.usage:
        raise ProtocolError("an answer without usage")
    answer.chunk_times_s.clear()  # one piece: no first token to speak of


async def _read_stream(response: httpx.Response, plan: RequestPlan, answer: _Answer) -> None:
    content_type = response.headers.get("content-type", "")
    if not content_type.startswith("text/event-stream"):
        raise ProtocolError(f"a stream of type {content_type!r}")
    if plan.disconnect_after_chunks == 0:
        raise _Left
    loop = asyncio.get_running_loop()
    decoder = EventDecoder()
    # Read past [DONE] to the end of the body: only then can the connection carry the next request.
    async for piece in response.aiter_raw():
        arrived_s = loop.time()
        for data in decoder.feed(piece):
            _take_event(data, answer, arrived_s)
            if plan.disconnect_after_chunks == len(answer.chunk_times_s):
                raise _Left
        if plan.read_delay_s:
            await asyncio.sleep(plan.read_delay_s)
    if answer.done_s is None:
        raise ServerError("the stream ended without [DONE]")


def _take_event(data: bytes, answer: _Answer, arrived_s: float) -> None:
    if answer.done_s is not None:
        raise ProtocolError("an event after [DONE]")
    if data != b"[DONE]":
        _take_chunk(_parse(data), answer, arrived_s)
    elif answer.finish_reason is None:
        raise ProtocolError("[DONE] before any finish_reason")
    else:
        answer.done_s = arrived_s


def _parse(data: bytes) -> dict[str, Any]:
    try:
        payload: object = orjson.loads(data)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {data[:80]!r}") from error
    if not isinstance(payload, dict):
        raise ProtocolError(f"not an object: {data[:80]!r}")
    return cast("dict[str, Any]", payload)


def _code_of(body: bytes) -> str | None:
    """The code of an OpenAI error object, or its type; None if the body is no such object."""
    try:
        error = _parse(body).get("error")
    except ProtocolError:
        return None
    return _error_code(error)


def _error_code(error: object) -> str | None:
    if not isinstance(error, dict):
        return None
    fields = cast("dict[str, Any]", error)
    code = fields.get("code") or fields.get("type")
    return code if isinstance(code, str) else None


def _take_chunk(payload: dict[str, Any], answer: _Answer, arrived_s: float) -> None:
    if error := payload.get("error"):
        raise ServerError(orjson.dumps(error).decode(), _error_code(error))
    if payload.get("usage"):
        answer.usage = payload["usage"]
    choices = payload.get("choices")
    if not isinstance(choices, list):
        raise ProtocolError("a chunk without choices")
    for choice in cast("list[dict[str, Any]]", choices):
        delta: dict[str, Any] = choice.get("delta") or choice.get("message") or choice
        text = delta.get("content") or delta.get("text") or ""
        reasoning = delta.get("reasoning_content") or ""
        if text or reasoning or delta.get("tool_calls"):
            answer.chunk_times_s.append(arrived_s)
            answer.texts.append(text)
            answer.reasoning.append(reasoning)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
