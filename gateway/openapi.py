"""GET /openapi.json: what the endpoints take and answer, with the parser's own limits.

Schemas say what a field may be alone; what fields may not be together is told by the 400 that names them. A null
counts as leaving a field out, and fields that nobody knows are ignored, so every schema is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from gateway.responses import json_response
from gateway.token_wire import MAX_IDS, MAX_TEXT_CHARS
from gateway.wire import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    MAX_TOOLS,
)
from scheduler.messages import MAX_SPEC, MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from gateway.fields import JsonObject

_TEXT: JsonObject = {"type": "string"}
_FLAG: JsonObject = {"type": ["boolean", "null"]}
_OBJECT: JsonObject = {"type": ["object", "null"]}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def openapi_route(version: str) -> Route:
    """The route; the document is made once."""
    document = openapi_document(version)

    async def show(request: Request) -> Response:
        del request
        return json_response(document)

    return Route("/openapi.json", show, methods=["GET"])


def openapi_document(version: str) -> JsonObject:
    """The OpenAPI 3.1 document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "stratagate", "version": version},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": {
            "/v1/chat/completions": _post("A chat answer", _chat(), streams=True),
            "/v1/completions": _post("A raw continuation", _completion(), streams=True),
            "/v1/messages": _post(
                "A chat answer in Anthropic's shape", _message(), streams=True, error="MessageError"
            ),
            "/v1/messages/count_tokens": _post(
                "Tokens of a chat's prompt", _message_count(), error="MessageError"
            ),
            "/v1/responses": _post(
                "A chat answer as an OpenAI response", _response(), streams=True
            ),
            "/tokenize": _post("Ids of a text or a chat", _tokenize()),
            "/detokenize": _post("Text of ids", _detokenize()),
            "/v1/models": _get("The model that is served"),
            "/health": _get("Whether the process should be left running"),
            "/ready": _get("Whether requests are taken now"),
        },
        "components": {
            "schemas": {"Error": _error(), "MessageError": _message_error()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _integer(low: int, high: int) -> JsonObject:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float, *, open_low: bool = False) -> JsonObject:
    bound = "exclusiveMinimum" if open_low else "minimum"
    return {"type": ["number", "null"], bound: low, "maximum": high}


def _array(items: JsonObject, low: int, high: int | None = None) -> JsonObject:
    array: JsonObject = {"type": "array", "items": items, "minItems": low}
    return array if high is None else {**array, "maxItems": high}


def _object(required: tuple[str, ...], **properties: JsonObject) -> JsonObject:
    return {"type": "object", "required": list(required), "properties": properties}


def _one_of(*values: str) -> JsonObject:
    return {"type": "string", "enum": list(values)}


def _optional(schema: JsonObject) -> JsonObject:
    return {"anyOf": [schema, {"type": "null"}]}


def _any(*schemas: JsonObject) -> JsonObject:
    return {"anyOf": list(schemas)}


def _part(kind: str = "text") -> JsonObject:
    return _object(("type", "text"), type=_one_of(kind), text=_TEXT)


def _sampling() -> dict[str, JsonObject]:
    """Fields that every generation takes."""
    token_id: JsonObject = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}
    return {
        "model": _TEXT,
        "stream": _FLAG,
        "temperature": _number(0, 2),
        "top_p": _number(0, 1, open_low=True),
        "top_k": _integer(-1, MAX_TOKENS),
        "min_p": _number(0, 1),
        "seed": _integer(-(2**63), 2**63 - 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0, 10, open_low=True),
        "min_tokens": _integer(0, MAX_TOKENS),
        "ignore_eos": _FLAG,
        "stop_token_ids": _optional(_array(token_id, 0, MAX_STOP_IDS)),
        "logit_bias": {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIASES,
        },
        "spec": _integer(0, MAX_SPEC),
        "spec_min_p": _number(0, 1),
    }


def _stop_strings() -> JsonObject:
    text: JsonObject = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return _array(text, 0, MAX_STOP_STRINGS)


def _openai() -> dict[str, JsonObject]:
    """Fields that both of OpenAI's completions take."""
    options = _object((), include_usage=_FLAG, continuous_usage_stats=_FLAG)
    return {
        **_sampling(),
        "max_tokens": _integer(1, MAX_TOKENS),
        "n": _integer(1, MAX_CHOICES),
        "stop": _any(_stop_strings(), {"type": ["string", "null"], "minLength": 1}),
        "stream_options": _optional(options),
        "user": {"type": ["string", "null"], "maxLength": 512},
        "prompt_cache_key": {"type": ["string", "null"], "maxLength": 512},
    }


def _thinking() -> dict[str, JsonObject]:
    return {"enable_thinking": _FLAG, "chat_template_kwargs": _OBJECT}


def _function() -> JsonObject:
    name: JsonObject = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
    return _object(("name",), name=name, description=_TEXT, parameters={"type": "object"})


def _messages() -> JsonObject:
    message = _object(
        ("role", "content"), role=_one_of(*_ROLES), content=_any(_TEXT, _array(_part(), 0))
    )
    return _array(message, 1)


def _chat() -> JsonObject:
    tool = _object(("type", "function"), type=_one_of("function"), function=_function())
    return _object(
        ("model", "messages"),
        messages=_messages(),
        max_completion_tokens=_integer(1, MAX_TOKENS),
        logprobs=_FLAG,
        top_logprobs=_integer(0, MAX_TOP_LOGPROBS),
        tools=_optional(_array(tool, 0, MAX_TOOLS)),
        tool_choice=_any(_TEXT, _OBJECT),
        parallel_tool_calls=_FLAG,
        response_format=_OBJECT,
        reasoning_effort=_optional(_one_of(*_EFFORTS)),
        continue_final_message=_FLAG,
        **_thinking(),
        **_openai(),
    )


def _completion() -> JsonObject:
    text: JsonObject = {"type": "string", "minLength": 1}
    ids = _array({"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}, 1)
    return _object(
        ("model", "prompt"),
        prompt=_any(text, ids, _array(text, 1, MAX_PROMPTS), _array(ids, 1, MAX_PROMPTS)),
        echo=_FLAG,
        logprobs=_integer(0, MAX_TOP_LOGPROBS),
        parse_special=_FLAG,
        **_openai(),
    )


def _message_count() -> JsonObject:
    message = _object(
        ("role", "content"),
        role=_one_of("user", "assistant", "system"),
        content=_any(_TEXT, _array(_part(), 0)),
    )
    tool = _object(
        ("name", "input_schema"),
        name={"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        description=_TEXT,
        input_schema={"type": "object"},
    )
    choice = _object(("type",), type=_one_of("auto", "any", "tool", "none"))
    thinking = _object(("type",), type=_one_of("enabled", "disabled", "adaptive"))
    return _object(
        ("model", "messages"),
        messages=_array(message, 1),
        system=_any(_TEXT, _array(_part(), 0), {"type": "null"}),
        stop_sequences=_optional(_stop_strings()),
        tools=_optional(_array(tool, 0, MAX_TOOLS)),
        tool_choice=_optional(choice),
        thinking=_optional(thinking),
        metadata=_OBJECT,
        **_thinking(),
        **_sampling(),
    )


def _message() -> JsonObject:
    schema = _message_count()
    properties = schema["properties"]
    assert isinstance(properties, dict)
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}
    return {
        **schema,
        "required": ["model", "max_tokens", "messages"],
        "properties": {**properties, "max_tokens": limit},
    }


def _response() -> JsonObject:
    item = _object(
        ("role", "content"),
        role=_one_of("user", "assistant", "system", "developer"),
        content=_any(_TEXT, _array(_part("input_text"), 0)),
    )
    tool = {**_function(), "required": ["type", "name"]}
    reasoning = _object((), effort=_optional(_one_of(*_EFFORTS)))
    return _object(
        ("model", "input"),
        input=_any(_TEXT, _array(item, 1)),
        instructions={"type": ["string", "null"]},
        max_output_tokens=_integer(1, MAX_TOKENS),
        tools=_optional(_array(tool, 0, MAX_TOOLS)),
        tool_choice=_any(_TEXT, _OBJECT),
        parallel_tool_calls=_FLAG,
        reasoning=_optional(reasoning),
        text=_OBJECT,
        metadata=_OBJECT,
        store={"enum": [False, None]},
        previous_response_id={"type": "null"},
        **_thinking(),
        **_sampling(),
    )


def _tokenize() -> JsonObject:
    flags = ("add_special_tokens", "parse_special", "return_token_strs")
    properties = dict.fromkeys(flags, _FLAG)
    text = _object(
        ("prompt",), prompt={"type": "string", "maxLength": MAX_TEXT_CHARS}, **properties
    )
    chat = _object(("messages",), messages=_messages(), **properties, **_thinking())
    return _any(text, chat)


def _detokenize() -> JsonObject:
    token_id: JsonObject = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}
    return _object(("tokens",), tokens=_array(token_id, 0, MAX_IDS))


def _error() -> JsonObject:
    text: JsonObject = {"type": ["string", "null"]}
    error = _object(
        ("message", "type", "param", "code"), message=_TEXT, type=_TEXT, param=text, code=text
    )
    return _object(("error",), error=error)


def _message_error() -> JsonObject:
    error = _object(("type", "message"), type=_TEXT, message=_TEXT)
    return _object(("type", "error"), type=_one_of("error"), error=error)


def _post(
    summary: str, body: JsonObject, *, streams: bool = False, error: str = "Error"
) -> JsonObject:
    answer: JsonObject = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        answer["text/event-stream"] = {"schema": {}}
    content = {"application/json": {"schema": body}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": {"description": summary, "content": answer}, **_failed(error)},
        }
    }


def _get(summary: str) -> JsonObject:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "get": {
            "summary": summary,
            "responses": {"200": {"description": summary, "content": content}, **_failed("Error")},
        }
    }


def _failed(schema: str) -> JsonObject:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {
        status: {"description": text, "content": content}
        for status, text in {"4XX": "What the request must change", "5XX": "Not now"}.items()
    }
