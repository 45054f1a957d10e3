"""POST /v1/responses, put into the fields of a chat completion.

Checks what is said differently there; ranges, limits and what is honoured are the chat endpoint's rules. Nothing is
kept between requests: a conversation is what `input` has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.chat_messages import parse_arguments
from gateway.fields import Fields, JsonObject, as_array, as_object, describe, refuse
from gateway.renaming import renamed
from gateway.unsupported import OFF_IN_RESPONSE, refuse_unsupported
from gateway.wire import MAX_TOKENS, parse_body, read_chat
from scheduler.messages import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from gateway.wire import ChatRequest

_SAME = (
    # Fields with one meaning in both, and the extras of this server.
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stream",
    "service_tier",
    "user",
    "prompt_cache_key",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "spec",
    "spec_min_p",
    "priority",
    "deadline_s",
    "enable_thinking",
    "chat_template_kwargs",
    "thinking_budget",
    "thinking_token_budget",
    "structured_outputs",
)
_NAMES = {
    # Names of the chat's fields, and what they came from.
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "include",
    "verbosity": "text.verbosity",
}
_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    "reasoning.encrypted_content",  # the thought is in the answer as it is: there is nothing to encrypt
    _LOGPROBS,
)
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A checked POST /v1/responses."""

    chat: ChatRequest
    echo: JsonObject
    """Fields that the answer repeats."""


def parse_response(body: bytes) -> ResponseRequest:
    """Body bytes of /v1/responses to a ResponseRequest. Raises InvalidRequest."""
    fields = parse_body(body)
    refuse_unsupported(fields, OFF_IN_RESPONSE)
    if (stream_options := fields.object("stream_options")) is not None:
        stream_options.boolean("include_obfuscation")
    chat: JsonObject = {name: fields.values[name] for name in _SAME if name in fields.values}
    chat["max_tokens"] = fields.integer("max_output_tokens", 1, MAX_TOKENS)
    chat["messages"] = _messages(fields)
    chat["tools"] = [_tool(item) for item in fields.objects("tools")]
    chat["tool_choice"] = _tool_choice(fields)
    chat |= _logprobs(fields)
    if (reasoning := fields.object("reasoning")) is not None:
        chat["reasoning_effort"] = reasoning.get("effort")
    if (text := fields.object("text")) is not None:
        chat["verbosity"] = text.get("verbosity")
        chat["response_format"] = _text_format(text)
    with renamed(_NAMES):
        return ResponseRequest(chat=read_chat(Fields(chat)), echo=_echo(fields))


def _logprobs(fields: Fields) -> JsonObject:
    included = fields.array("include") or []
    for index, item in enumerate(included):
        if item not in INCLUDED:
            refuse(f"include[{index}]", f"is not supported by this server; found {describe(item)}")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if _LOGPROBS in included:
        return {"logprobs": True, "top_logprobs": top}
    if top:
        refuse("top_logprobs", f"needs {_LOGPROBS!r} in include")
    return {}


def _echo(fields: Fields) -> JsonObject:
    metadata = fields.object("metadata")
    reasoning = fields.object("reasoning")
    return {
        **{name: fields.get(name) for name in _ECHOED},
        "metadata": {} if metadata is None else metadata.values,
        "top_logprobs": fields.get("top_logprobs") or 0,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.get("effort"),
            "summary": None,
        },
        "text": fields.get("text") or {"format": {"type": "text"}},
        "tools": fields.get("tools") or [],
        "tool_choice": fields.get("tool_choice") or "auto",
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
    }


def _messages(fields: Fields) -> list[object]:
    messages = _Messages()
    instructions = fields.string("instructions")
    if instructions is not None:
        messages.add("system", instructions)
    value = fields.get("input")
    if value is None:
        refuse("input", "is required")
    if isinstance(value, str):
        messages.add("user", value)
        return messages.all()
    items = as_array("input", value)
    if not items:
        refuse("input", "must not be empty")
    for index, item in enumerate(items):
        _add_item(messages, as_object(f"input[{index}]", item))
    return messages.all()


class _Messages:
    """The chat's messages; thoughts, texts and calls of the assistant that follow each other become one."""

    def __init__(self) -> None:
        self._items: list[object] = []
        self._turn: _AssistantTurn | None = None
        """The assistant's message that is open."""

    def add(self, role: str, content: str, **more: object) -> None:
        self._close()
        self._items.append({"role": role, "content": content, **more})

    def assistant(self) -> _AssistantTurn:
        self._turn = self._turn or _AssistantTurn()
        return self._turn

    def all(self) -> list[object]:
        self._close()
        return self._items

    def _close(self) -> None:
        if self._turn is not None:
            self._items.append(self._turn.message())
        self._turn = None


@dataclass(slots=True)
class _AssistantTurn:
    thoughts: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[JsonObject] = field(default_factory=list["JsonObject"])

    def message(self) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": "".join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _add_item(messages: _Messages, item: Fields) -> None:
    kind = item.string("type") or "message"
    match kind:
        case "message":
            role = item.one_of("role", ("user", "assistant", "system", "developer"))
            if role is None:
                refuse(item.param("role"), "is required")
            text = _text(item, "content")
            if role == "assistant":
                messages.assistant().texts.append(text)
            else:
                messages.add(role, text)
        case "reasoning":
            messages.assistant().thoughts.append(_thought(item))
        case "function_call":
            name = _required(item, "name")
            if not name:
                refuse(item.param("name"), "must not be empty")
            function: JsonObject = {"name": name, "arguments": parse_arguments(item)}
            call: JsonObject = {"id": _required(item, "call_id"), "function": function}
            messages.assistant().calls.append(call)
        case "function_call_output":
            messages.add("tool", _text(item, "output"), tool_call_id=_required(item, "call_id"))
        case _:
            refuse(item.param("type"), f"is not supported by this server; found {describe(kind)}")


def _required(item: Fields, name: str) -> str:
    value = item.string(name)
    if value is None:
        refuse(item.param(name), "is required")
    return value


def _text(item: Fields, name: str) -> str:
    """A string, or parts that are text."""
    value = item.get(name)
    if value is None:
        refuse(item.param(name), "is required")
    if isinstance(value, str):
        return value
    return "".join(_part(part) for part in item.objects(name))


def _part(part: Fields) -> str:
    kind = part.string("type")
    if kind == "refusal":
        return _required(part, "refusal")
    if kind not in ("input_text", "output_text", "text"):
        found = describe(kind)
        refuse(part.param("type"), f"must be text: this model reads text only; found {found}")
    return _required(part, "text")


def _thought(item: Fields) -> str:
    """The thought as it was; of another server's, the summary."""
    for name in ("content", "summary"):
        texts = [_required(part, "text") for part in item.objects(name)]
        if texts:
            return "".join(texts)
    return ""


def _tool(item: Fields) -> JsonObject:
    kind = item.string("type")
    if kind != "function":
        refuse(item.param("type"), f"must be 'function'; found {describe(kind)}")
    names = ("name", "description", "parameters", "strict")
    function = {name: item.get(name) for name in names if item.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields) -> object:
    if isinstance(fields.get("tool_choice"), str):
        return fields.get("tool_choice")
    choice = fields.object("tool_choice")
    if choice is None:
        return None
    if choice.string("type") != "function":
        refuse("tool_choice.type", f"must be 'function'; found {describe(choice.get('type'))}")
    return {"type": "function", "function": {"name": _required(choice, "name")}}


def _text_format(text: Fields) -> JsonObject | None:
    wanted = text.object("format")
    if wanted is None:
        return None
    if wanted.string("type") != "json_schema":
        return wanted.values
    names = ("name", "description", "schema", "strict")
    schema = {name: wanted.get(name) for name in names if wanted.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}
