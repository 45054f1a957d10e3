"""GET /openapi.json: what the endpoints take and answer, with the limits of the parsers and of the loaded model.

Schemas say what a field may be alone; what fields may not be together is told by the 400 that names them. A null
counts as leaving a field out, and fields that nobody knows are ignored, so every schema is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from starlette.routing import Route

from gateway.json_schema import TEXT, ref
from gateway.openapi_replies import codes_of, reply_schemas
from gateway.openapi_requests import request_schemas
from gateway.responses import json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from gateway.fields import JsonObject
    from scheduler.messages import EngineInfo

_ABOUT = """\
OpenAI's protocol, and Anthropic's messages, over one model. Fields that nobody knows are ignored; a field that is known
and cannot be honoured is refused by name. A stream's errors come as its last event. Request headers beyond 64 KiB get
431, other methods than those listed 405."""
_ERRORS = {
    400: "A field, named by `param`, or the conversation is wrong",
    401: "No API key, or a wrong one",
    403: "A host name that is not this server's",
    404: "Another model than the one that is served",
    408: "The rest of the body did not come",
    413: "The body is larger than the limit; it was not read",
    415: "The body does not say that it is JSON",
    429: "The queue is full, or the key has used what it may",
    500: "This request failed, or the server is at fault",
    503: "The engine starts again, or the server stops",
    504: "The request's deadline passed",
}
_BODY_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500)
_RETRIED = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One path and method."""

    summary: str
    answer: str | None
    """Schema of the answer; None: text."""
    tag: str
    body: str | None = None
    stream: str | None = None
    """What a stream has, where the answer may be one."""
    error: str = "Error"
    fails: tuple[int, ...] = (403,)
    states: tuple[int, ...] = (200,)
    """Statuses with `answer`."""
    media_type: str = "application/json"
    has_key: bool = True
    parameters: tuple[JsonObject, ...] = ()


_GENERATING = (*_BODY_ERRORS, 503, 504)
_CHUNKS = "`data:` lines with one JSON chunk each ({}), and last `data: [DONE]`."
_EVENTS = "{} events, each an `event:` and a `data:` line with JSON."
_MODEL_ID: JsonObject = {"name": "model", "in": "path", "required": True, "schema": TEXT}
_OPERATIONS: dict[tuple[str, str], _Operation] = {
    ("post", "/v1/chat/completions"): _Operation(
        summary="A chat answer",
        tag="OpenAI",
        body="ChatRequest",
        answer="ChatAnswer",
        stream=_CHUNKS.format("ChatChunk"),
        fails=_GENERATING,
    ),
    ("post", "/v1/completions"): _Operation(
        summary="A raw continuation",
        tag="OpenAI",
        body="CompletionRequest",
        answer="CompletionAnswer",
        stream=_CHUNKS.format("a CompletionAnswer without usage, its finish_reason null but once"),
        fails=_GENERATING,
    ),
    ("post", "/v1/responses"): _Operation(
        summary="A chat answer as an OpenAI response; nothing is kept",
        tag="OpenAI",
        body="ResponseRequest",
        answer="Response",
        stream=_EVENTS.format("OpenAI's response"),
        fails=_GENERATING,
    ),
    ("get", "/v1/models"): _Operation(
        summary="The model that is served", tag="OpenAI", answer="Models", fails=(401, 403)
    ),
    ("get", "/v1/models/{model}"): _Operation(
        summary="The same, by its name",
        tag="OpenAI",
        answer="Model",
        fails=(401, 403, 404),
        parameters=(_MODEL_ID,),
    ),
    ("post", "/v1/messages"): _Operation(
        summary="A chat answer in Anthropic's shape",
        tag="Anthropic",
        body="MessageRequest",
        answer="Message",
        stream=_EVENTS.format("Anthropic's message"),
        error="MessageError",
        fails=_GENERATING,
    ),
    ("post", "/v1/messages/count_tokens"): _Operation(
        summary="Tokens of a chat's prompt",
        tag="Anthropic",
        body="CountRequest",
        answer="TokenCount",
        error="MessageError",
        fails=_BODY_ERRORS,
    ),
    ("post", "/tokenize"): _Operation(
        summary="Ids of a text or a chat",
        tag="Tokens",
        body="TokenizeRequest",
        answer="Tokens",
        fails=_BODY_ERRORS,
    ),
    ("post", "/detokenize"): _Operation(
        summary="Text of ids",
        tag="Tokens",
        body="DetokenizeRequest",
        answer="Prompt",
        fails=_BODY_ERRORS,
    ),
    ("get", "/v1/status"): _Operation(
        summary="What the server is and does now",
        tag="Operations",
        answer="Status",
        fails=(401, 403),
    ),
    ("get", "/health"): _Operation(
        summary="Whether the process should be left running",
        tag="Operations",
        answer="Health",
        states=(200, 503),
        has_key=False,
    ),
    ("get", "/ready"): _Operation(
        summary="Whether requests are taken now",
        tag="Operations",
        answer="Ready",
        states=(200, 503),
        has_key=False,
    ),
    ("get", "/metrics"): _Operation(
        summary="Prometheus text",
        tag="Operations",
        answer=None,
        media_type="text/plain",
        has_key=False,
    ),
}


def openapi_route(version: str, info: EngineInfo) -> Route:
    """The route; the document is made once, when somebody asks for it."""

    @cache
    def document() -> JsonObject:
        return openapi_document(version, info)

    async def show(request: Request) -> Response:
        del request
        return json_response(document())

    return Route("/openapi.json", show, methods=["GET"])


def openapi_document(version: str, info: EngineInfo) -> JsonObject:
    """The OpenAPI 3.1 document."""
    paths: dict[str, JsonObject] = {}
    for (method, path), operation in _OPERATIONS.items():
        paths.setdefault(path, {})[method] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "stratagate", "version": version, "description": _ABOUT},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**request_schemas(info), **reply_schemas()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(method: str, path: str, operation: _Operation) -> JsonObject:
    words = path.replace("{", "").replace("}", "").strip("/").replace("/", "_")
    result: JsonObject = {
        "operationId": f"{method}_{words}",
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(operation),
    }
    if operation.parameters:
        result["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content = {"application/json": {"schema": ref(operation.body)}}
        result["requestBody"] = {"required": True, "content": content}
    if not operation.has_key:
        result["security"] = [{}]
    return result


def _responses(operation: _Operation) -> JsonObject:
    schema = TEXT if operation.answer is None else ref(operation.answer)
    content: JsonObject = {operation.media_type: {"schema": schema}}
    if operation.stream is not None:
        words = f"With `stream`: {operation.stream}"
        content["text/event-stream"] = {"schema": {"description": words}}
    answer: JsonObject = {"description": operation.summary, "content": content}
    request_id: JsonObject = {"X-Request-Id": {"schema": TEXT}}
    answers: JsonObject = {
        str(status): {**answer, "headers": request_id} for status in operation.states
    }
    errors = {str(status): _failure(status, operation.error) for status in operation.fails}
    return {**answers, **errors}


def _failure(status: int, schema: str) -> JsonObject:
    codes = ", ".join(f"`{code}`" for code in codes_of(status))
    headers: JsonObject = {"X-Request-Id": {"schema": TEXT}}
    if status in _RETRIED:
        words = "Seconds after which to try again"
        headers["Retry-After"] = {
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
            "description": words,
        }
    return {
        "description": f"{_ERRORS[status]}: {codes}",
        "headers": headers,
        "content": {"application/json": {"schema": ref(schema)}},
    }
