"""The messages of a chat: their types and their strict parse.

What leaves here is text and JSON values; nothing behind it checks roles, parts or arguments again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import orjson

from gateway.errors import InvalidRequest
from gateway.fields import (
    Fields,
    JsonObject,
    as_object,
    check_depth,
    describe,
    refuse,
)
from gateway.json_input import CrowdedJson, load_json

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
TEXT_PARTS = ("text", "input_text", "output_text")


class Role(StrEnum):
    """Who speaks. `developer` is read as `system`."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the assistant made earlier."""

    id: str
    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn, or one part of a turn."""

    role: Role
    content: str = ""
    """Text parts joined without a separator, as the model family's own template does."""
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


def parse_messages(fields: Fields) -> tuple[Message, ...]:
    """Read `messages`; system and developer messages at the front become one."""
    if fields.get("messages") is None:
        raise InvalidRequest("messages is required", param="messages")
    messages = [_parse_message(item) for item in fields.objects("messages")]
    if not messages:
        raise InvalidRequest("messages must have at least one message", param="messages")
    return _merge_leading_system(messages)


def _merge_leading_system(messages: list[Message]) -> tuple[Message, ...]:
    count = 0
    while count < len(messages) and messages[count].role is Role.SYSTEM:
        count += 1
    if count < 2:
        return tuple(messages)
    text = "\n\n".join(message.content for message in messages[:count])
    return (Message(role=Role.SYSTEM, content=text), *messages[count:])


def _parse_message(fields: Fields) -> Message:
    role_name = fields.one_of("role", tuple(ROLES))
    if role_name is None:
        refuse(fields.param("role"), "is required")
    role = ROLES[role_name]
    content = _parse_content(fields)
    name = fields.string("name")
    if role is Role.ASSISTANT:
        if content is None:  # what a model that declined has said
            content = fields.string("refusal")
        return _parse_assistant(fields, content, name)
    for field in ("tool_calls", "reasoning_content"):
        if fields.get(field) is not None:
            refuse(fields.param(field), f"belongs to an assistant message; the role is {role}")
    if content is None:
        refuse(fields.param("content"), "is required")
    tool_call_id = fields.string("tool_call_id")
    if tool_call_id is not None and role is not Role.TOOL:
        refuse(fields.param("tool_call_id"), f"belongs to a tool message; the role is {role}")
    return Message(role=role, content=content, name=name, tool_call_id=tool_call_id)


def _parse_assistant(fields: Fields, content: str | None, name: str | None) -> Message:
    tool_calls = tuple(_parse_tool_call(item) for item in fields.objects("tool_calls"))
    # Clients of other servers send the thought back under either name, or inside the content.
    reasoning = fields.string("reasoning_content")
    if reasoning is None:
        reasoning = fields.string("reasoning")
    if fields.get("function_call") is not None:
        refuse(fields.param("function_call"), "is not supported; use tool_calls")
    if content is None and reasoning is None and not tool_calls:
        refuse(fields.param("content"), "is required when there are no tool_calls")
    content = content or ""
    if reasoning is None:
        reasoning, content = _split_thought(content)
    return Message(
        role=Role.ASSISTANT,
        content=content,
        reasoning_content=reasoning,
        name=name,
        tool_calls=tool_calls,
    )


def _split_thought(content: str) -> tuple[str | None, str]:
    """Take a leading `<think>...</think>` out of an earlier answer."""
    text = content.lstrip()
    if not text.startswith(_THINK_OPEN) or _THINK_CLOSE not in text:
        return None, content
    reasoning, _, rest = text[len(_THINK_OPEN) :].partition(_THINK_CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _parse_content(fields: Fields) -> str | None:
    value = fields.get("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        found = describe(value)
        refuse(fields.param("content"), f"must be a string or an array of parts; found {found}")
    return "".join(_parse_part(part) for part in fields.objects("content"))


def _parse_part(part: Fields) -> str:
    kind = part.string("type")
    if kind is None:
        refuse(part.param("type"), "is required")
    if kind == "refusal":
        text = part.string("refusal")
    elif kind in TEXT_PARTS:
        text = part.string("text")
    else:
        refuse(
            part.param("type"), f"must be 'text': this model reads text only; found {kind!r:.60}"
        )
    if text is None:
        refuse(part.param("text"), "is required")
    return text


def _parse_tool_call(fields: Fields) -> ToolCall:
    kind = fields.string("type")
    if kind not in (None, "function"):
        refuse(fields.param("type"), f"must be 'function'; found {kind!r:.60}")
    function = fields.object("function")
    if function is None:
        refuse(fields.param("function"), "is required")
    name = function.string("name")
    if not name:
        refuse(function.param("name"), "is required")
    return ToolCall(id=fields.string("id") or "", name=name, arguments=parse_arguments(function))


def parse_arguments(function: Fields) -> JsonObject:
    """The arguments: a JSON object in a string, as OpenAI has it, or the object itself."""
    param = function.param("arguments")
    value = function.get("arguments")
    if isinstance(value, str):
        if not value.strip():
            return {}
        try:
            value = load_json(value)
        except CrowdedJson as error:
            refuse(param, f"has {error}")
        except orjson.JSONDecodeError:
            refuse(param, "must be a JSON object written as a string")
    if value is None:
        return {}
    arguments = as_object(param, value).values
    check_depth(param, arguments)
    return arguments
