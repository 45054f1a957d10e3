"""Tools: what a client offers, and the model family's XML-like calls turned into names and JSON arguments.

A call reads `<tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> ... </function> </tool_call>`. Its
arguments go out in pieces that are together one JSON object, whatever the model leaves unfinished.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateway.fields import JsonObject

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function=", "</function>"
_PARAMETER_OPEN, _PARAMETER_CLOSE = "<parameter=", "</parameter>"
_MAX_NAME_CHARS = 256
_STRING_BODY = re.compile(r'(?:[^"\\\n]|\\[^\n])*')
"""Of a JSON string, which has no line ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    declaration: JsonObject
    """As the client sent it; the template shows it to the model."""

    @property
    def is_strict(self) -> bool:
        """Arguments must follow the schema."""
        return cast("JsonObject", self.declaration["function"]).get("strict") is True

    @property
    def parameters(self) -> JsonObject:
        """The schema of the arguments; empty when none is declared."""
        found = cast("JsonObject", self.declaration["function"]).get("parameters")
        return cast("JsonObject", found) if isinstance(found, dict) else {}

    def takes_text(self, parameter: str) -> bool | None:
        """Whether a parameter's schema has it a string, and nothing else; None when the schema does not say."""
        function = cast("JsonObject", self.declaration["function"])
        schema = function.get("parameters")
        properties = (
            cast("JsonObject", schema).get("properties") if isinstance(schema, dict) else None
        )
        if not isinstance(properties, dict):
            return None
        found = cast("JsonObject", properties).get(parameter)
        kind = cast("JsonObject", found).get("type") if isinstance(found, dict) else None
        return None if kind is None else kind == "string"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """News of one call: its name first, then pieces of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


def merged_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """One delta for each call: clients need not expect two of one call at once."""
    merged: dict[int, CallDelta] = {}
    for delta in deltas:
        before = merged.get(delta.index)
        merged[delta.index] = (
            delta
            if before is None
            else CallDelta(
                index=delta.index,
                name=before.name,
                arguments=before.arguments + delta.arguments,
            )
        )
    return list(merged.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStep:
    """What a piece of text brought."""

    deltas: list[CallDelta]
    rest: str | None = None
    """Text behind the call, once it has ended; None while it goes on."""
    was_call: bool = True
    """False: what followed `<tool_call>` is no call, and all of it is in `rest`."""


class _State(Enum):
    HEAD = auto()
    """Before `<function=NAME>`."""
    BODY = auto()
    """Between parameters."""
    TAIL = auto()
    """Behind `</function>`."""


class CallParser:
    """Reads one call after another; `push` takes the text behind `<tool_call>`."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._state = _State.HEAD
        self._held = ""
        self._num_calls = 0
        self._num_arguments = 0
        self._tool: Tool | None = None
        self._has_ended = False
        """No more text comes."""

    def push(self, text: str) -> CallStep:
        """Take text of the present call, or the beginning of one."""
        self._held += text
        deltas: list[CallDelta] = []
        while True:
            before = self._state, self._held
            end = self._step(deltas)
            if end is not None:
                self._state, self._held = _State.HEAD, ""
                return CallStep(deltas=deltas, rest=end.rest, was_call=end.was_call)
            if before == (self._state, self._held):
                return CallStep(deltas=deltas)

    def end_text(self) -> CallStep:
        """No more text comes; what waited for some is settled. `finish` closes what is open then."""
        self._has_ended = True
        return self.push("")

    def finish(self) -> tuple[list[CallDelta], str]:
        """The output ended inside a call: its arguments are closed; a call without a name is text."""
        if self._state is _State.HEAD:
            return [], CALL_OPEN + self._held
        return ([self._close()] if self._state is _State.BODY else []), ""

    def _step(self, deltas: list[CallDelta]) -> CallStep | None:
        match self._state:
            case _State.HEAD:
                return self._head(deltas)
            case _State.BODY:
                self._body(deltas)
                return None
            case _State.TAIL:
                return self._tail()

    def _head(self, deltas: list[CallDelta]) -> CallStep | None:
        visible = self._held.lstrip()
        if _FUNCTION_OPEN.startswith(visible):
            return None
        name, closed, rest = visible.removeprefix(_FUNCTION_OPEN).partition(">")
        is_open = visible.startswith(_FUNCTION_OPEN) and "\n" not in name
        if not is_open or len(name) > _MAX_NAME_CHARS or (closed and not name.strip()):
            return CallStep(deltas=[], rest=self._held, was_call=False)
        if closed:
            name = name.strip()
            self._tool = self._tools.get(name)
            self._state, self._held, self._num_arguments = _State.BODY, rest, 0
            deltas.append(CallDelta(index=self._num_calls, name=name))
            self._num_calls += 1
        return None

    def _tail(self) -> CallStep | None:
        """A call that is never closed ends where the next one begins."""
        end, begin = self._held.find(CALL_CLOSE), self._held.find(CALL_OPEN)
        if end >= 0 and not 0 <= begin < end:
            return CallStep(deltas=[], rest=self._held[end + len(CALL_CLOSE) :])
        return CallStep(deltas=[], rest=self._held[begin:]) if begin >= 0 else None

    def _body(self, deltas: list[CallDelta]) -> None:
        # Whatever stands between parameters and is none of this is dropped.
        starts = {
            tag: self._held.find(tag) for tag in (_PARAMETER_OPEN, _FUNCTION_CLOSE, CALL_CLOSE)
        }
        found = {tag: start for tag, start in starts.items() if start >= 0}
        if not found:
            return
        tag = min(found, key=lambda tag: found[tag])
        if tag == _PARAMETER_OPEN:
            self._parameter(self._held[found[tag] + len(tag) :], deltas)
            return
        deltas.append(self._close())
        self._held = self._held[found[tag] :]
        self._state = _State.TAIL

    def _parameter(self, text: str, deltas: list[CallDelta]) -> None:
        key, closed, rest = text.partition(">")
        key = key.strip()
        end = self._value_end(key, rest) if closed else None
        if end is None:
            return
        value, self._held = rest[:end], rest[end + len(_PARAMETER_CLOSE) :]
        value = value.removeprefix("\n").removesuffix("\n")
        pair = orjson.dumps({key: self._value(key, value)}).decode()
        opening = "{" if self._num_arguments == 0 else ", "
        self._num_arguments += 1
        deltas.append(CallDelta(index=self._num_calls - 1, arguments=opening + pair[1:-1]))

    def _value_end(self, key: str, text: str) -> int | None:
        """Where the value's closing tag stands: in JSON the first that is in no string. None: not known yet."""
        first = text.find(_PARAMETER_CLOSE)
        if first < 0:
            return None
        if self._takes_text(key):
            return first
        end = _end_outside_strings(text)
        if end is None:
            return first if self._has_ended else None
        return end if _is_json(text[:end]) else first

    def _takes_text(self, key: str) -> bool | None:
        return None if self._tool is None else self._tool.takes_text(key)

    def _value(self, key: str, text: str) -> object:
        """Strings come raw, other values as JSON; without a schema, JSON where it is JSON and no string."""
        if self._takes_text(key):
            return text
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            return text

    def _close(self) -> CallDelta:
        return CallDelta(
            index=self._num_calls - 1, arguments="{}" if self._num_arguments == 0 else "}"
        )


def _end_outside_strings(text: str) -> int | None:
    """The first closing tag that is in no JSON string; None while a string is open or no such tag has come.

    A string that a line end breaks is none: text with one is not JSON, and its first tag counts.
    """
    position = 0
    while True:
        end, quote = text.find(_PARAMETER_CLOSE, position), text.find('"', position)
        if quote < 0 or 0 <= end < quote:
            return end if end >= 0 else None
        body = _STRING_BODY.match(text, quote + 1)
        assert body is not None
        after = text[body.end() : body.end() + 2]
        if not after.startswith('"'):
            return None if after in ("", "\\") else text.find(_PARAMETER_CLOSE)
        position = body.end() + 1


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
