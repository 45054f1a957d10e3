"""Pure ASGI middleware: ids, errors and access log; API keys; body size.

None of them buffers a response or stands between the endpoint and a disconnect.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from string import punctuation
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect

from gateway.errors import TABLE, BodyStalled, BodyTooLarge, NotAuthenticated, reply_for
from gateway.json_log import FIELDS
from gateway.limits import Allowance
from gateway.responses import error_response
from gateway.stream import CUT
from scheduler.errors import Draining

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gateway.config import ApiKey

OWNER = "stratagate.owner"
"""Scope key: name of the API key's owner, empty without keys."""
REQUEST_ID = "stratagate.request_id"
"""Scope key: id of the request, the client's own where it sent a usable one."""

ALLOWANCE = "stratagate.allowance"
"""Scope key: the Allowance that a generation is charged to; absent without keys."""

_GOOD_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PROBES = frozenset({"/health", "/ready", "/metrics", "/v1/status"})
"""Paths that are asked for every few seconds; their lines would bury the others."""
_AS_IT_IS = punctuation.replace("%", "")
"""What a path has in the log besides ASCII letters and digits."""
_access = logging.getLogger("stratagate.access")
_log = logging.getLogger("stratagate.gateway")


class Envelope:
    """Around every request: an id, an error object for what endpoints raise, one line in the log.

    The outermost place where everything is caught. The log never has what a request said.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope[REQUEST_ID] = request_id
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if status is None:
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        started_s = time.monotonic()
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # uvicorn's last word, when it stops, to what still runs: a client that never sent its whole body, say.
            if status is not None:
                raise
            stopping = Draining("the server is shutting down", retry_after_s=1.0)
            response = error_response(reply_for(stopping), path=scope["path"])
            await response(scope, receive, send_with_id)
        except Exception as error:
            if type(error) not in TABLE:
                _log.exception("request failed id=%s", request_id)
            if status is not None:
                raise
            response = error_response(reply_for(error), path=scope["path"])
            await response(scope, receive, send_with_id)
        finally:
            is_probe = scope["path"] in _PROBES
            path = _quoted(scope["path"])
            seconds, owner = time.monotonic() - started_s, scope.get(OWNER) or None
            cut: str | None = scope.get(CUT)
            _access.log(
                logging.DEBUG if is_probe else logging.INFO,
                "%s %s %s %.3fs id=%s%s%s",
                scope["method"],
                path,
                status or "-",
                seconds,
                request_id,
                f" key={owner}" if owner else "",
                f" cut: {cut}" if cut else "",
                extra={
                    FIELDS: {
                        "method": scope["method"],
                        "path": path,
                        "status": status,
                        "seconds": round(seconds, 6),
                        "request_id": request_id,
                        "key": owner,
                        "cut": cut,
                    }
                },
            )


def _quoted(path: str) -> str:
    """A decoded path as one word of the log: a line break, a space or a terminal's escape code in it is %-escaped."""
    return quote(path, safe=_AS_IT_IS, errors="replace")


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _GOOD_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class ApiKeys:
    """Lets only known keys reach /v1 and the tokenizer, each within its limits; notes whose it was."""

    def __init__(self, app: ASGIApp, keys: tuple[ApiKey, ...]) -> None:
        self._app = app
        self._keys = [
            (key, key.secret.encode(), Allowance(key.limits, time.monotonic)) for key in keys
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or not _needs_key(scope["path"]):
            scope[OWNER] = ""
            await self._app(scope, receive, send)
            return
        key, allowance = self._key_of(Headers(scope=scope))
        scope[OWNER] = key.name
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        allowance.begin()
        scope[ALLOWANCE] = allowance
        try:
            await self._app(scope, receive, send)
        finally:
            allowance.end()

    def _key_of(self, headers: Headers) -> tuple[ApiKey, Allowance]:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            token = headers.get("x-api-key", "")
        given = token.strip().encode()
        # Every key is compared, so that the time taken says nothing about any of them.
        found = [
            (key, allowance)
            for key, secret, allowance in self._keys
            if hmac.compare_digest(secret, given)
        ]
        if not found:
            raise NotAuthenticated(
                "the API key is not valid" if given else "an API key is required: send it as Bearer"
            )
        return found[0]


def _needs_key(path: str) -> bool:
    return path.startswith("/v1") or path in ("/tokenize", "/detokenize")


class BodyLimit:
    """Refuses bodies beyond a limit, by their announced length unread or at the byte too many, and those that stall."""

    def __init__(self, app: ASGIApp, limit_bytes: int, timeout_s: float) -> None:
        """timeout_s: between two parts of a body."""
        self._app = app
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._limit_bytes:
            raise BodyTooLarge(limit_bytes=self._limit_bytes)
        num_bytes, is_whole = 0, False

        async def receive_counted() -> Message:
            nonlocal num_bytes, is_whole
            # Behind the body there is only the client's leaving, which may take as long as the answer.
            message = await (receive() if is_whole else self._next_part(receive))
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._limit_bytes:
                    raise BodyTooLarge(limit_bytes=self._limit_bytes)
            return message

        await self._app(scope, receive_counted, send)

    async def _next_part(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await receive()
        except TimeoutError as error:
            raise BodyStalled(timeout_s=self._timeout_s) from error
