"""Schemas of request bodies for /openapi.json, with the parsers' own limits and the loaded model's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.chat_messages import ROLES, TEXT_PARTS
from gateway.json_schema import (
    ANY_OBJECT,
    FLAG,
    TEXT,
    array,
    described,
    either,
    integer,
    matching,
    number,
    off,
    one_of,
    struct,
    text,
)
from gateway.messages_wire import ANTHROPIC_EFFORTS
from gateway.responses_api_wire import INCLUDED
from gateway.structured import (
    FORMAT_NAME,
    MAX_CHOICE_STRINGS,
    MAX_GRAMMAR_CHARS,
    MAX_STRUCTURE_CHARS,
    NOT_STRUCTURED,
)
from gateway.token_wire import MAX_IDS, MAX_TEXT_CHARS
from gateway.unsupported import (
    OFF_IN_CHAT,
    OFF_IN_COMPLETION,
    OFF_IN_MESSAGE,
    OFF_IN_RESPONSE,
)
from gateway.wire import (
    EFFORTS,
    MAX_CHOICES,
    MAX_DEADLINE_S,
    MAX_KEY_CHARS,
    MAX_LOGIT_BIASES,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    MAX_TOOLS,
    MIN_DEADLINE_S,
    MIN_SEED,
    RESERVED_TEMPLATE_NAMES,
    TEMPLATE_NAME,
    TOOL_NAME,
)
from scheduler.messages import MAX_SPEC, MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.fields import JsonObject
    from scheduler.messages import EngineInfo

_Properties = dict[str, "JsonObject"]
_SCHEMA = described(ANY_OBJECT, "A JSON Schema; a keyword that cannot be enforced is a 400.")


def request_schemas(info: EngineInfo) -> dict[str, JsonObject]:
    """By name."""
    return _Requests(token_id=integer(0, info.vocab_size - 1), limit=info.max_context - 1).schemas()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requests:
    token_id: JsonObject
    limit: int
    """Most tokens that can follow the shortest prompt."""

    def schemas(self) -> dict[str, JsonObject]:
        return {
            "ChatRequest": self._chat(),
            "CompletionRequest": self._completion(),
            "MessageRequest": self._message({"max_tokens": integer(1, self.limit)}),
            # Counting asks neither the vocabulary nor the context what they allow.
            "CountRequest": replace(
                self, token_id=integer(0, MAX_TOKENS), limit=MAX_TOKENS
            )._message({}),
            "ResponseRequest": self._response(),
            "TokenizeRequest": self._tokenize(),
            "DetokenizeRequest": struct(
                {"tokens": array(self.token_id, 0, MAX_IDS)}, {"model": TEXT}
            ),
        }

    def _sampling(self) -> _Properties:
        """Fields that every generation takes."""
        biases: JsonObject = {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": number(-100, 100),
            "maxProperties": MAX_LOGIT_BIASES,
            "description": "By token id.",
        }
        return {
            "stream": FLAG,
            "temperature": number(0, 2),
            "top_p": number(0, 1, open_low=True),
            "top_k": described(integer(-1, MAX_TOKENS), "0 and -1: all."),
            "min_p": number(0, 1),
            "seed": integer(MIN_SEED, MAX_SEED),
            "presence_penalty": number(-2, 2),
            "frequency_penalty": number(-2, 2),
            "repetition_penalty": number(0, 10, open_low=True),
            "min_tokens": integer(0, self.limit),
            "ignore_eos": FLAG,
            "stop_token_ids": array(self.token_id, 0, MAX_STOP_IDS),
            "logit_bias": biases,
            "spec": described(integer(0, MAX_SPEC), "Longest draft chain."),
            "spec_min_p": number(0, 1),
            "priority": described(integer(-MAX_PRIORITY, MAX_PRIORITY), "Smaller goes first."),
            "deadline_s": number(MIN_DEADLINE_S, MAX_DEADLINE_S),
            "prompt_cache_key": text(0, MAX_KEY_CHARS),
            "structured_outputs": _structured_outputs(),
        }

    def _thinking(self) -> _Properties:
        reserved = sorted(RESERVED_TEMPLATE_NAMES)
        budget = described(integer(0, MAX_TOKENS), "Tokens after which the thought is closed.")
        return {
            "enable_thinking": FLAG,
            "chat_template_kwargs": {
                **struct({}, {"enable_thinking": FLAG}),
                "propertyNames": {**matching(TEMPLATE_NAME), "not": {"enum": reserved}},
            },
            "thinking_budget": budget,
        }

    def _openai(self) -> _Properties:
        """Fields that both of OpenAI's completions take."""
        return {
            **self._sampling(),
            "max_tokens": integer(1, self.limit),
            "n": integer(1, MAX_CHOICES),
            "stop": either(_stop_strings(), text(1, MAX_STOP_CHARS)),
            "stream_options": described(
                struct({}, {"include_usage": FLAG, "continuous_usage_stats": FLAG}),
                "Only together with stream.",
            ),
            "user": text(0, MAX_KEY_CHARS),
            "response_format": _response_format(),
        }

    def _chat(self) -> JsonObject:
        own = {
            "max_completion_tokens": integer(1, self.limit),
            "logprobs": FLAG,
            "top_logprobs": described(integer(0, MAX_TOP_LOGPROBS), "Only together with logprobs."),
            "tools": array(_tool(), 0, MAX_TOOLS),
            "tool_choice": _tool_choice(),
            "parallel_tool_calls": FLAG,
            "reasoning_effort": one_of(*EFFORTS),
            "thinking_token_budget": integer(0, MAX_TOKENS),
            "continue_final_message": FLAG,
        }
        body = struct(
            {"model": TEXT, "messages": _messages()}, {**self._openai(), **self._thinking(), **own}
        )
        return _with_off(body, OFF_IN_CHAT)

    def _completion(self) -> JsonObject:
        ids, string = array(self.token_id, 1), text(1)
        prompts = array(either(string, ids), 1, MAX_PROMPTS)
        own = {
            "echo": FLAG,
            "logprobs": integer(0, MAX_TOP_LOGPROBS),
            "parse_special": FLAG,
        }
        body = struct(
            {"model": TEXT, "prompt": either(string, ids, prompts)}, {**self._openai(), **own}
        )
        return _with_off(body, OFF_IN_COMPLETION)

    def _message(self, required: _Properties) -> JsonObject:
        output_format = struct({"type": one_of("json_schema"), "schema": _SCHEMA})
        more = {
            "max_tokens": integer(1, self.limit),
            "system": either(TEXT, array(_part())),
            "stop_sequences": _stop_strings(),
            "tools": array(_anthropic_tool(), 0, MAX_TOOLS),
            "tool_choice": _anthropic_choice(),
            "thinking": _anthropic_thinking(),
            "metadata": struct({}, {"user_id": text(0, MAX_KEY_CHARS)}),
            "output_format": output_format,
            "output_config": struct(
                {}, {"effort": one_of(*ANTHROPIC_EFFORTS), "format": output_format}
            ),
        }
        body = struct(
            {"model": TEXT, **required, "messages": array(_anthropic_message(), 1)},
            {
                **self._sampling(),
                **self._thinking(),
                **{name: schema for name, schema in more.items() if name not in required},
            },
        )
        return _with_off(body, OFF_IN_MESSAGE)

    def _response(self) -> JsonObject:
        json_schema = struct(
            {"type": one_of("json_schema"), "name": matching(FORMAT_NAME), "schema": _SCHEMA},
            {"description": TEXT, "strict": FLAG},
        )
        own = {
            "instructions": TEXT,
            "max_output_tokens": integer(1, self.limit),
            "tools": array(_response_tool(), 0, MAX_TOOLS),
            "tool_choice": either(
                one_of("none", "auto", "required"),
                struct({"type": one_of("function"), "name": TEXT}),
            ),
            "parallel_tool_calls": FLAG,
            "reasoning": struct({}, {"effort": one_of(*EFFORTS)}),
            "text": struct(
                {},
                {
                    "format": either(struct({"type": one_of("text", "json_object")}), json_schema),
                    "verbosity": one_of("medium"),
                },
            ),
            "include": array(one_of(*INCLUDED)),
            "top_logprobs": described(
                integer(0, MAX_TOP_LOGPROBS), "Only together with include's logprobs."
            ),
            "thinking_token_budget": integer(0, MAX_TOKENS),
            "stop": either(_stop_strings(), text(1, MAX_STOP_CHARS)),
            "user": text(0, MAX_KEY_CHARS),
            "metadata": ANY_OBJECT,
        }
        body = struct(
            {"model": TEXT, "input": either(TEXT, array(_item(), 1))},
            {**self._sampling(), **self._thinking(), **own},
        )
        return _with_off(body, OFF_IN_RESPONSE)

    def _tokenize(self) -> JsonObject:
        more: _Properties = {
            **dict.fromkeys(("add_special_tokens", "parse_special", "return_token_strs"), FLAG),
            "model": TEXT,
        }
        chat = {**more, **self._thinking(), "tools": array(_tool(), 0, MAX_TOOLS)}
        return either(
            struct({"prompt": text(0, MAX_TEXT_CHARS)}, more),
            struct({"messages": _messages()}, chat),
        )


def _with_off(body: JsonObject, known: Mapping[str, tuple[object, ...]]) -> JsonObject:
    """The body with the fields of other servers that are refused."""
    properties = body["properties"]
    assert isinstance(properties, dict)
    refused = {name: off(values) for name, values in known.items() if name not in properties}
    return {**body, "properties": {**properties, **refused}}


def _stop_strings() -> JsonObject:
    return array(text(1, MAX_STOP_CHARS), 0, MAX_STOP_STRINGS)


def _part(*kinds: str) -> JsonObject:
    return struct({"type": one_of(*kinds or ("text",)), "text": TEXT})


def _messages() -> JsonObject:
    content = either(TEXT, array(_part(*sorted(TEXT_PARTS))))
    others = [role for role in ROLES if role not in ("assistant", "tool")]
    call = struct(
        {"function": struct({"name": text(1)}, {"arguments": _arguments()})},
        {"id": TEXT, "type": one_of("function")},
    )
    answer = struct(
        {"role": one_of("assistant"), "content": content},
        {"name": TEXT, "reasoning_content": TEXT, "tool_calls": array(call)},
    )
    calls = struct(
        {"role": one_of("assistant"), "tool_calls": array(call, 1)},
        {"name": TEXT, "content": content, "reasoning_content": TEXT},
    )
    result = struct(
        {"role": one_of("tool"), "content": content}, {"name": TEXT, "tool_call_id": TEXT}
    )
    said = struct({"role": one_of(*others), "content": content}, {"name": TEXT})
    return described(
        array(either(said, answer, calls, result), 1),
        "The chat template may refuse an order of roles.",
    )


def _arguments() -> JsonObject:
    return either(described(TEXT, "A JSON object, written as a string."), ANY_OBJECT)


def _function() -> _Properties:
    return {"description": TEXT, "parameters": ANY_OBJECT, "strict": FLAG}


def _tool() -> JsonObject:
    function = struct({"name": matching(TOOL_NAME)}, _function())
    return struct({"type": one_of("function"), "function": function})


def _tool_choice() -> JsonObject:
    named = struct({"type": one_of("function"), "function": struct({"name": TEXT})})
    return described(
        either(one_of("none", "auto", "required"), named),
        "`required` needs tools, and a function that is named must be one of them.",
    )


def _response_format() -> JsonObject:
    spec = struct(
        {"name": matching(FORMAT_NAME), "schema": _SCHEMA}, {"description": TEXT, "strict": FLAG}
    )
    return either(
        struct({"type": one_of("text")}),
        struct({"type": one_of("json_object")}, {"schema": _SCHEMA}),
        struct({"type": one_of("json_schema"), "json_schema": spec}),
    )


def _structured_outputs() -> JsonObject:
    kinds: _Properties = {
        "json": either(_SCHEMA, described(TEXT, "A JSON Schema, written as a string.")),
        "regex": text(1, MAX_STRUCTURE_CHARS),
        "choice": array(text(1), 1, MAX_CHOICE_STRINGS),
        "grammar": text(1, MAX_GRAMMAR_CHARS),
        "json_object": {"const": True},
    }
    forms = [struct({name: schema}) for name, schema in kinds.items()]
    refused = {name: off(()) for name in NOT_STRUCTURED}
    return described(
        {"type": "object", "properties": refused, "oneOf": forms},
        "One of these; not together with response_format.",
    )


def _anthropic_message() -> JsonObject:
    result = struct(
        {"type": one_of("tool_result"), "tool_use_id": TEXT},
        {"content": either(TEXT, array(_part())), "is_error": FLAG},
    )
    thought = struct({"type": one_of("thinking"), "thinking": TEXT}, {"signature": TEXT})
    hidden = struct({"type": one_of("redacted_thinking")}, {"data": TEXT})
    use = struct(
        {"type": one_of("tool_use"), "id": TEXT, "name": text(1), "input": ANY_OBJECT},
    )
    return either(
        struct({"role": one_of("user"), "content": either(TEXT, array(either(_part(), result)))}),
        struct(
            {
                "role": one_of("assistant"),
                "content": either(TEXT, array(either(_part(), thought, hidden, use))),
            }
        ),
        struct({"role": one_of("system"), "content": either(TEXT, array(_part()))}),
    )


def _anthropic_tool() -> JsonObject:
    return struct(
        {"name": matching(TOOL_NAME), "input_schema": ANY_OBJECT},
        {"type": one_of("custom"), "description": TEXT, "strict": FLAG},
    )


def _anthropic_choice() -> JsonObject:
    parallel = {"disable_parallel_tool_use": FLAG}
    return either(
        struct({"type": one_of("auto", "any", "none")}, parallel),
        struct({"type": one_of("tool"), "name": TEXT}, parallel),
    )


def _anthropic_thinking() -> JsonObject:
    kind = one_of("enabled", "disabled", "adaptive")
    return struct({"type": kind}, {"budget_tokens": integer(1, MAX_TOKENS)})


def _response_tool() -> JsonObject:
    return struct({"type": one_of("function"), "name": matching(TOOL_NAME)}, _function())


def _item() -> JsonObject:
    content = either(TEXT, array(_part("input_text", "output_text", "text")))
    message = struct(
        {"role": one_of("user", "assistant", "system", "developer"), "content": content},
        {"type": one_of("message")},
    )
    call = struct(
        {"type": one_of("function_call"), "call_id": TEXT, "name": text(1)},
        {"arguments": _arguments()},
    )
    result = struct({"type": one_of("function_call_output"), "call_id": TEXT, "output": content})
    thought = struct(
        {"type": one_of("reasoning")},
        {
            "content": array(struct({"text": TEXT}, {"type": TEXT})),
            "summary": array(struct({"text": TEXT}, {"type": TEXT})),
        },
    )
    return either(message, call, result, thought)
