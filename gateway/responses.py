"""Starlette responses that several modules make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from gateway.messages_reply import message_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.errors import ErrorReply


def json_response(
    payload: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON body."""
    return Response(
        orjson.dumps(payload), status_code=status, headers=headers, media_type="application/json"
    )


def error_response(reply: ErrorReply, *, path: str = "") -> Response:
    """An error object with its status and headers, in the shape of the API that the path belongs to."""
    headers: dict[str, str] = {}
    if reply.retry_after_s is not None:
        headers["retry-after"] = str(reply.retry_after_s)
    if reply.status == 401:
        headers["www-authenticate"] = "Bearer"
    if reply.status in (408, 413):
        # The rest of the body is still on its way, or never comes, and will not be read.
        headers["connection"] = "close"
    body = message_error(reply) if path.startswith("/v1/messages") else reply.body()
    return json_response(body, reply.status, headers)
