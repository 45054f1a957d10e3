"""Errors of the gateway and the one table that turns every error into an OpenAI error object.

GatewayError
 +-- InvalidRequest        400  a field that is wrong, named by `param`
 +-- NotAuthenticated      401  no key, or not one of ours
 +-- HostNotAllowed        403  a host name that is not this server's
 +-- RateLimited           429  more than the API key may use
 +-- ModelNotFound         404  a model that is not served here
 +-- BodyStalled           408  a body whose next part does not come
 +-- BodyTooLarge          413  more bytes than the limit; the rest is left unread
 +-- UnsupportedMediaType  415  a body that does not say it is JSON
 +-- ConfigError           exit 2  an option that contradicts another or cannot be used
 +-- TokenizerError        exit 2  tokenizer or chat template files that cannot be used
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler import errors as scheduler_errors


class GatewayError(Exception):
    """Anything the gateway refuses."""


class InvalidRequest(GatewayError):
    """A request that is wrong in itself; `param` is the path of the field, None for the body as a whole."""

    def __init__(self, message: str, *, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotAuthenticated(GatewayError):
    """No API key, or a wrong one."""


class HostNotAllowed(GatewayError):
    """The request is for a host that this server does not answer to."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"this server does not answer to the host {shorten(host)!r}; --allowed-host adds one"
        )


class RateLimited(GatewayError):
    """The API key has used what it may for now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelNotFound(GatewayError):
    """The model of the request is not served here."""

    def __init__(self, model: str, *, served: str) -> None:
        super().__init__(f"the model {shorten(model)!r} does not exist; this server has {served!r}")


class BodyStalled(GatewayError):
    """The body began to come and then did not go on."""

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__(f"nothing more of the body came for {timeout_s:g} s")


class BodyTooLarge(GatewayError):
    """The body is larger than the limit."""

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(f"the body is larger than {limit_bytes} bytes, the limit of this server")


class UnsupportedMediaType(GatewayError):
    """The body is not declared as plain JSON.

    A web page may send any other type to a server on this machine without asking it first.
    """

    def __init__(self, header: str, wanted: str, found: str) -> None:
        super().__init__(f"the {header} must be {wanted}; found {shorten(found) or 'none'}")


class ConfigError(GatewayError):
    """Options that cannot be used together, or a file named by one that cannot be used."""


class TokenizerError(GatewayError):
    """Tokenizer or template files that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorKind:
    """How one kind of error is answered."""

    status: int
    type: str
    code: str | None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
INTERNAL = ErrorKind(status=500, type=_SERVER, code="internal_error")

TABLE: dict[type[Exception], ErrorKind] = {
    InvalidRequest: ErrorKind(status=400, type=_INVALID, code="invalid_value"),
    NotAuthenticated: ErrorKind(status=401, type="authentication_error", code="invalid_api_key"),
    HostNotAllowed: ErrorKind(status=403, type="permission_error", code="host_not_allowed"),
    RateLimited: ErrorKind(status=429, type="rate_limit_error", code="rate_limit_exceeded"),
    ModelNotFound: ErrorKind(status=404, type=_INVALID, code="model_not_found"),
    BodyStalled: ErrorKind(status=408, type=_INVALID, code="body_timeout"),
    BodyTooLarge: ErrorKind(status=413, type=_INVALID, code="body_too_large"),
    UnsupportedMediaType: ErrorKind(status=415, type=_INVALID, code="unsupported_media_type"),
    # These two stop the start; a client never meets them.
    ConfigError: INTERNAL,
    TokenizerError: INTERNAL,
    scheduler_errors.RequestRejected: ErrorKind(status=400, type=_INVALID, code="invalid_value"),
    scheduler_errors.RequestTooLong: ErrorKind(
        status=400, type=_INVALID, code="context_length_exceeded"
    ),
    scheduler_errors.NotNow: ErrorKind(status=503, type=_SERVER, code="unavailable"),
    scheduler_errors.Overloaded: ErrorKind(status=429, type="rate_limit_error", code="queue_full"),
    scheduler_errors.Draining: ErrorKind(status=503, type=_SERVER, code="draining"),
    scheduler_errors.EngineUnavailable: ErrorKind(
        status=503, type=_SERVER, code="engine_unavailable"
    ),
    scheduler_errors.RequestFailed: ErrorKind(status=500, type=_SERVER, code="request_failed"),
    scheduler_errors.DeadlineExceeded: ErrorKind(
        status=504, type=_SERVER, code="deadline_exceeded"
    ),
    scheduler_errors.EngineDead: ErrorKind(status=503, type=_SERVER, code="engine_dead"),
    scheduler_errors.SlotFailed: ErrorKind(status=500, type=_SERVER, code="slot_failed"),
    scheduler_errors.GrammarFailed: ErrorKind(status=400, type=_INVALID, code="invalid_value"),
    scheduler_errors.EngineStartFailed: INTERNAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """An error as the client sees it."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None
    retry_after_s: int | None

    def body(self) -> dict[str, object]:
        """The OpenAI error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def reply_for(error: BaseException) -> ErrorReply:
    """Look an error up in the table; what is not in it is ours, and its text stays with us."""
    kind = TABLE.get(type(error))  # type: ignore[arg-type]
    if kind is None:
        kind, message = INTERNAL, "internal error; the server's log has the details"
    else:
        message = str(error)
    retry_after_s = 1 if kind.status == 503 else None
    if isinstance(error, scheduler_errors.NotNow | RateLimited):
        retry_after_s = max(1, math.ceil(error.retry_after_s))
    param = None
    code = kind.code
    if isinstance(error, InvalidRequest):
        param = error.param
        code = error.code or code
    elif isinstance(error, ModelNotFound):
        param = "model"
    return ErrorReply(
        status=kind.status,
        message=message,
        type=kind.type,
        param=param,
        code=code,
        retry_after_s=retry_after_s,
    )


def shorten(text: str, limit: int = 60) -> str:
    """A value for an error message: never the client's megabyte back."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
