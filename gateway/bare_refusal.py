"""Answers to what is not yet a request: whole HTTP answers as bytes, for connections that end with them."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

import orjson

from gateway.errors import ErrorReply

if TYPE_CHECKING:
    import asyncio


class _Cycle(Protocol):
    response_started: bool
    response_complete: bool
    disconnected: bool


def is_amid_answer(cycle: _Cycle | None) -> bool:
    """Whether a refusal would become a part of the answer that uvicorn's cycle sends."""
    return cycle is not None and cycle.response_started and not cycle.response_complete


def has_answer_to_end(cycle: _Cycle | None) -> bool:
    """Whether a request is being answered, or will be."""
    return cycle is not None and not cycle.response_complete


def drop_connection(cycle: _Cycle, transport: asyncio.WriteTransport) -> None:
    """End a connection with all that is buffered for it.

    The cycle is told: it would take an answer that does not end for a fault of the application, and log it as one.
    """
    cycle.disconnected = True
    transport.abort()


def bare_refusal(status: HTTPStatus, code: str, message: str) -> bytes:
    """An OpenAI error object behind its headers. Which API was meant is not known here."""
    reply = ErrorReply(
        status=status,
        message=message,
        type="invalid_request_error",
        param=None,
        code=code,
        retry_after_s=None,
    )
    body = orjson.dumps(reply.body())
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, status.phrase.encode(), len(body), body)
    )


MALFORMED = bare_refusal(
    HTTPStatus.BAD_REQUEST, "bad_request", "this is not a request that HTTP/1.1 allows"
)
