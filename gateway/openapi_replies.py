"""Schemas of answers for /openapi.json; objects of answers may get more fields later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import TABLE
from gateway.json_schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    SECONDS,
    TEXT,
    array,
    either,
    one_of,
    optional,
    ref,
    reply,
    struct,
)
from scheduler.messages import FinishReason
from scheduler.stats import EngineState, Outcome

if TYPE_CHECKING:
    from gateway.fields import JsonObject

_ENGINE = one_of(*EngineState)
_FINISH = one_of(*FinishReason, "tool_calls")


def reply_schemas() -> dict[str, JsonObject]:
    """By name."""
    return {
        "Usage": _usage(),
        "ChatAnswer": _chat(),
        "ChatChunk": _chat_chunk(),
        "CompletionAnswer": _completion(),
        "Message": _message(),
        "Response": _response(),
        "TokenCount": reply(input_tokens=COUNT),
        "Tokens": reply(
            count=COUNT,
            max_model_len=COUNT,
            tokens=array(COUNT),
            token_strs=optional(array(TEXT)),
        ),
        "Prompt": reply(prompt=TEXT),
        "Model": _model_card(),
        "Models": reply(object=one_of("list"), data=array(ref("Model"))),
        "Health": reply(status=one_of("ok", "failed"), engine=_ENGINE),
        "Ready": reply(ready=FLAG, engine=_ENGINE),
        "Status": _status(),
        "Error": _error(),
        "MessageError": reply(type=one_of("error"), error=reply(type=TEXT, message=TEXT)),
    }


def codes_of(status: int) -> list[str]:
    """The codes of errors with this status."""
    codes = {kind.code for kind in TABLE.values() if kind.status == status and kind.code}
    # A path that does not exist never comes to an endpoint.
    return sorted(codes | ({"not_found"} if status == 404 else set()))


def _error() -> JsonObject:
    return reply(error=reply(message=TEXT, type=TEXT, param=optional(TEXT), code=optional(TEXT)))


def _usage() -> JsonObject:
    details = struct(
        {"accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT},
        {"reasoning_tokens": COUNT},
    )
    return reply(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=reply(cached_tokens=COUNT),
        completion_tokens_details=details,
    )


def _head(kind: str) -> dict[str, JsonObject]:
    return {
        "id": TEXT,
        "object": one_of(kind),
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": TEXT,
    }


def _logprobs() -> JsonObject:
    entry: dict[str, JsonObject] = {
        "token": TEXT,
        "logprob": NUMBER,
        "bytes": optional(array(COUNT)),
    }
    token = reply(**entry, top_logprobs=array(reply(**entry)))
    return reply(content=array(token), refusal={"type": "null"})


def _call(*, whole: bool) -> JsonObject:
    function = struct({"arguments": TEXT}, {"name": TEXT})
    if whole:
        function = reply(name=TEXT, arguments=TEXT)
        return reply(id=TEXT, type=one_of("function"), function=function)
    return struct({"index": COUNT, "function": function}, {"id": TEXT, "type": TEXT})


def _chat() -> JsonObject:
    message = struct(
        {"role": one_of("assistant"), "content": optional(TEXT), "refusal": {"type": "null"}},
        {"reasoning_content": TEXT, "tool_calls": array(_call(whole=True), 1)},
    )
    choice = reply(
        index=COUNT, message=message, logprobs=optional(_logprobs()), finish_reason=_FINISH
    )
    return reply(**_head("chat.completion"), choices=array(choice, 1), usage=ref("Usage"))


def _chat_chunk() -> JsonObject:
    delta = struct(
        {},
        {
            "role": one_of("assistant"),
            "content": TEXT,
            "reasoning_content": TEXT,
            "tool_calls": array(_call(whole=False), 1),
        },
    )
    choice = reply(
        index=COUNT,
        delta=delta,
        logprobs=optional(_logprobs()),
        finish_reason=optional(_FINISH),
    )
    return struct(
        {**_head("chat.completion.chunk"), "choices": array(choice, 0, 1)},
        {"usage": ref("Usage")},
    )


def _completion() -> JsonObject:
    logprobs = reply(
        tokens=array(TEXT),
        token_logprobs=array(NUMBER),
        top_logprobs=array({"type": "object", "additionalProperties": NUMBER}),
        text_offset=array(COUNT),
    )
    choice = reply(index=COUNT, text=TEXT, logprobs=optional(logprobs), finish_reason=_FINISH)
    return reply(**_head("text_completion"), choices=array(choice, 1), usage=ref("Usage"))


def _message() -> JsonObject:
    block = either(
        reply(type=one_of("thinking"), thinking=TEXT, signature=TEXT),
        reply(type=one_of("text"), text=TEXT),
        reply(type=one_of("tool_use"), id=TEXT, name=TEXT, input=ANY_OBJECT),
    )
    return reply(
        id=TEXT,
        type=one_of("message"),
        role=one_of("assistant"),
        model=TEXT,
        content=array(block),
        stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=optional(TEXT),
        usage=reply(
            input_tokens=COUNT,
            output_tokens=COUNT,
            cache_creation_input_tokens=COUNT,
            cache_read_input_tokens=COUNT,
        ),
    )


def _response() -> JsonObject:
    text_part = reply(
        type=one_of("output_text"),
        text=TEXT,
        annotations=array(ANY_OBJECT),
        logprobs=array(ANY_OBJECT),
    )
    thought_part = reply(type=one_of("reasoning_text"), text=TEXT)
    state = {"id": TEXT, "status": one_of("completed", "incomplete", "in_progress")}
    item = either(
        reply(**state, type=one_of("reasoning"), content=array(thought_part)),
        reply(**state, type=one_of("message"), role=TEXT, content=array(text_part)),
        reply(**state, type=one_of("function_call"), call_id=TEXT, name=TEXT, arguments=TEXT),
    )
    usage = reply(
        input_tokens=COUNT,
        input_tokens_details=reply(cached_tokens=COUNT),
        output_tokens=COUNT,
        output_tokens_details=reply(reasoning_tokens=COUNT),
        total_tokens=COUNT,
    )
    return reply(
        id=TEXT,
        object=one_of("response"),
        created_at=COUNT,
        status=one_of("completed", "incomplete"),
        incomplete_details=optional(reply(reason=one_of("max_output_tokens"))),
        error={"type": "null"},
        model=TEXT,
        output=array(item),
        usage=usage,
        store={"const": False},
    )


def _model_card() -> JsonObject:
    return reply(id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, max_model_len=COUNT)


def _status() -> JsonObject:
    model = reply(
        id=TEXT,
        device=TEXT,
        dtype=TEXT,
        kv_dtype=TEXT,
        kernels=TEXT,
        max_context=COUNT,
        chunk_tokens=COUNT,
        load_s=SECONDS,
    )
    slot = reply(
        index=COUNT,
        phase=one_of("free", "reading", "decoding"),
        prompt_tokens=COUNT,
        read_tokens=COUNT,
        output_tokens=COUNT,
    )
    requests = reply(
        submitted=COUNT,
        rejected=COUNT,
        preemptions=COUNT,
        outcomes=reply(**{str(outcome): COUNT for outcome in Outcome}),
    )
    store = reply(
        conversations=COUNT,
        bytes=COUNT,
        capacity_bytes=COUNT,
        lookups=COUNT,
        hits=COUNT,
        resumed_tokens=COUNT,
        parked=COUNT,
        evictions=COUNT,
        refused=COUNT,
    )
    part = reply(name=TEXT, planned_bytes=COUNT, actual_bytes=optional(COUNT))
    return reply(
        object=one_of("status"),
        version=TEXT,
        uptime_s=SECONDS,
        ready=FLAG,
        draining=FLAG,
        model=model,
        engine=reply(state=_ENGINE, restarts=COUNT),
        slots=array(slot, 1),
        queue=reply(length=COUNT),
        requests=requests,
        tokens=reply(prompt=COUNT, completion=COUNT, per_s=SECONDS, window_s=COUNT),
        drafts=reply(
            max_depth=COUNT,
            by_depth=array(reply(depth=COUNT, offered=COUNT, accepted=COUNT)),
        ),
        windows=reply(count=COUNT, seconds=SECONDS),
        store=optional(store),
        memory_plan=array(part),
    )
