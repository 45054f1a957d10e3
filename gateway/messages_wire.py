"""POST /v1/messages in Anthropic's shape, put into the fields of a chat completion.

Checks what is said differently there; ranges, limits and what is honoured are the chat endpoint's rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gateway.fields import Fields, JsonObject, as_object, check_depth, describe, refuse
from gateway.renaming import renamed
from gateway.unsupported import OFF_IN_MESSAGE, refuse_unsupported
from gateway.wire import MAX_TOKENS, parse_body, read_chat

if TYPE_CHECKING:
    from gateway.wire import ChatRequest

_SAME = (
    # Fields with one meaning in both, and the extras of this server.
    "model",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
    "spec",
    "spec_min_p",
    "priority",
    "deadline_s",
    "enable_thinking",
    "chat_template_kwargs",
    "thinking_budget",
    "structured_outputs",
    "prompt_cache_key",
)
_NAMES = {
    # Names of the chat's fields, and what they came from.
    "stop": "stop_sequences",
    "response_format": "output_format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
}
ANTHROPIC_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def parse_message(body: bytes) -> ChatRequest:
    """Body bytes of /v1/messages to a ChatRequest. Raises InvalidRequest."""
    fields = parse_body(body)
    if fields.integer("max_tokens", 1, MAX_TOKENS) is None:
        refuse("max_tokens", "is required")
    return _read(fields)


def parse_count(body: bytes) -> ChatRequest:
    """Body bytes of /v1/messages/count_tokens to a ChatRequest. Raises InvalidRequest."""
    return _read(parse_body(body))


def _read(fields: Fields) -> ChatRequest:
    refuse_unsupported(fields, OFF_IN_MESSAGE)
    chat: JsonObject = {name: fields.values[name] for name in _SAME if name in fields.values}
    chat["max_tokens"] = fields.integer("max_tokens", 1, MAX_TOKENS)
    chat["stop"] = fields.array("stop_sequences")
    chat["messages"] = _messages(fields)
    chat["tools"] = [_tool(item) for item in fields.objects("tools")]
    chat |= _tool_choice(fields) | _thinking(fields) | _output(fields)
    if (metadata := fields.object("metadata")) is not None:
        chat["user"] = metadata.string("user_id")
    with renamed(_NAMES):
        return read_chat(Fields(chat))


def _messages(fields: Fields) -> list[object]:
    if fields.get("messages") is None:
        refuse("messages", "is required")
    result: list[object] = []
    system = fields.get("system")
    if system is not None:
        result.append({"role": "system", "content": _text("system", system)})
    count = len(result)
    for item in fields.objects("messages"):
        role = item.one_of("role", ("user", "assistant", "system"))
        if role is None:
            refuse(item.param("role"), "is required")
        if item.get("content") is None:
            refuse(item.param("content"), "is required")
        if role == "assistant":
            result.append(_assistant(item))
        elif role == "system":
            text = _text(item.param("content"), item.get("content"))
            result.append({"role": "system", "content": text})
        else:
            result += _user(item)
    if len(result) == count:
        refuse("messages", "must have at least one message")
    return result


def _blocks(param: str, value: object) -> list[Fields]:
    """Content as a list of blocks; a string is one block of text."""
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, f"{param}.")]
    if not isinstance(value, list):
        refuse(param, f"must be a string or an array of blocks; found {describe(value)}")
    items = cast("list[object]", value)
    return [as_object(f"{param}[{index}]", item) for index, item in enumerate(items)]


def _text(param: str, value: object) -> str:
    """Content that can be nothing but text."""
    return "".join(_text_of(block) for block in _blocks(param, value))


def _text_of(block: Fields) -> str:
    kind = block.string("type")
    if kind != "text":
        refuse(
            block.param("type"),
            f"must be 'text': this model reads text only; found {describe(kind)}",
        )
    return _required(block, "text")


def _required(block: Fields, name: str) -> str:
    value = block.string(name)
    if value is None:
        refuse(block.param(name), "is required")
    return value


def _user(item: Fields) -> list[object]:
    """A user turn; results of tools in it become messages of their own."""
    messages: list[object] = []
    texts: list[str] = []
    for block in _blocks(item.param("content"), item.get("content")):
        if block.string("type") != "tool_result":
            texts.append(_text_of(block))
            continue
        if texts:
            messages.append({"role": "user", "content": "".join(texts)})
            texts = []
        content = block.get("content")
        messages.append(
            {
                "role": "tool",
                "tool_call_id": _required(block, "tool_use_id"),
                "content": "" if content is None else _text(block.param("content"), content),
            }
        )
        block.boolean("is_error")
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


def _assistant(item: Fields) -> JsonObject:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    for block in _blocks(item.param("content"), item.get("content")):
        match block.string("type"):
            case "thinking":
                thoughts.append(_required(block, "thinking"))
            case "redacted_thinking":
                pass  # another provider's, unreadable here
            case "tool_use":
                calls.append(_call(block))
            case _:
                texts.append(_text_of(block))
    message: JsonObject = {"role": "assistant", "content": "".join(texts), "tool_calls": calls}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _call(block: Fields) -> JsonObject:
    name = _required(block, "name")
    if not name:
        refuse(block.param("name"), "must not be empty")
    given = block.object("input")
    if given is None:
        refuse(block.param("input"), "is required")
    check_depth(block.param("input"), given.values)
    return {
        "id": _required(block, "id"),
        "type": "function",
        "function": {"name": name, "arguments": given.values},
    }


def _tool(item: Fields) -> JsonObject:
    kind = item.string("type")
    if kind not in (None, "custom"):
        refuse(item.param("type"), f"must be 'custom'; found {describe(kind)}")
    schema = item.object("input_schema")
    if schema is None:
        refuse(item.param("input_schema"), "is required")
    function: JsonObject = {"name": item.get("name"), "parameters": schema.values}
    if (description := item.string("description")) is not None:
        function["description"] = description
    if (strict := item.boolean("strict")) is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields) -> JsonObject:
    choice = fields.object("tool_choice")
    if choice is None:
        return {}
    kind = choice.one_of("type", ("auto", "any", "tool", "none"))
    if kind is None:
        refuse(choice.param("type"), "is required")
    wanted: object = {"auto": "auto", "any": "required", "none": "none"}.get(kind)
    if kind == "tool":
        wanted = {"type": "function", "function": {"name": _required(choice, "name")}}
    chat: JsonObject = {"tool_choice": wanted}
    if choice.boolean("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _thinking(fields: Fields) -> JsonObject:
    """As there, nothing is thought unless it is asked for."""
    thinking = fields.object("thinking")
    kind, budget = "disabled", None
    if thinking is not None:
        kind = thinking.one_of("type", ("enabled", "disabled", "adaptive"))
        if kind is None:
            refuse(thinking.param("type"), "is required")
        budget = thinking.integer("budget_tokens", 1, MAX_TOKENS)
    chat: JsonObject = {} if kind == "disabled" else {"thinking_token_budget": budget}
    own = fields.object("chat_template_kwargs")
    if fields.get("enable_thinking") is None and not (own and "enable_thinking" in own.values):
        chat["enable_thinking"] = kind != "disabled"
    return chat


def _output(fields: Fields) -> JsonObject:
    output, config = fields.object("output_format"), fields.object("output_config")
    chat: JsonObject = {}
    if config is not None:
        output = config.object("format") if output is None else output
        chat["reasoning_effort"] = config.one_of("effort", ANTHROPIC_EFFORTS)
    if output is None:
        return chat
    schema = output.object("schema")
    if output.string("type") != "json_schema" or schema is None:
        refuse(output.param("type"), "must be 'json_schema', with a schema")
    wrapped: JsonObject = {"name": "output", "schema": schema.values}
    return {**chat, "response_format": {"type": "json_schema", "json_schema": wrapped}}
