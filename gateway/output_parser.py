"""Output text to reasoning, content and tool calls: a state machine that any split of the text leads to the same end.

Knows the tags of the model family, nothing of tokens or HTTP. White space around the thought and before a call, and the
newlines behind them, belong to the format, not to the text, and are dropped.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from msgspec import Struct

from gateway.detokenize import hold_from
from gateway.tools import CALL_OPEN, CallDelta, CallParser

if TYPE_CHECKING:
    from gateway.content_tokens import ContentSpans
    from gateway.tools import CallStep, Tool

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class ParsedDelta(Struct, frozen=True, kw_only=True, gc=False):
    """New text of each part, in the order in which the parts come."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class _State(Enum):
    START = auto()
    """Nothing but white space so far: a thought may still open."""
    REASONING = auto()
    AFTER_TAG = auto()
    """Behind a thought or a call: newlines are dropped."""
    CONTENT = auto()
    CALL = auto()


class OutputParser:
    """Parser state of one answer."""

    def __init__(
        self, *, in_thought: bool, tools: tuple[Tool, ...] = (), spans: ContentSpans | None = None
    ) -> None:
        """in_thought: the prompt has opened the thought already. Without tools, tags of calls are text.

        spans: is told which characters become content.
        """
        self.spans = spans
        self._num_chars = 0
        """Characters of the output so far; counted for `spans` alone."""
        self._state = _State.REASONING if in_thought else _State.START
        self._held = ""
        self._any_reasoning = False
        self._gap = ""
        """White space before the present call: text again if it turns out to be none."""
        self._calls = CallParser({tool.name: tool for tool in tools}) if tools else None

    @property
    def is_through(self) -> bool:
        """All that still comes is content, and nobody wants to know where it is: the parser is not needed any more."""
        return self._state is _State.CONTENT and self._calls is None and self.spans is None

    def push(self, text: str) -> ParsedDelta:
        """Parts that are now certain."""
        parts = _Parts()
        self._num_chars += len(text)
        rest, self._held = self._held + text, ""
        self._run(rest, parts)
        if self.spans is not None and self._state is not _State.CALL:
            self.spans.num_decided = self._num_chars - len(self._held)
        return parts.delta()

    def finish(self) -> ParsedDelta:
        """What was held back: it did not become a tag."""
        parts = _Parts()
        if self._state is _State.CALL and self._calls is not None:
            self._run(self._after(self._calls.end_text(), parts), parts)
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            parts.reasoning += held.rstrip()
        elif self._state is _State.CALL and self._calls is not None:
            calls, text = self._calls.finish()
            if text:
                self._add_content(self._gap + text, parts)
            parts.calls += calls
        else:
            self._add_content(held, parts)
        return parts.delta()

    def _run(self, rest: str | None, parts: _Parts) -> None:
        while rest:
            rest = self._step(rest, parts)

    def _add_content(self, content: str, parts: _Parts, num_behind: int = 0) -> None:
        """num_behind: characters of the output so far that come after it."""
        parts.content += content
        if self.spans is not None:
            end = self._num_chars - num_behind
            self.spans.add(end - len(content), end)

    def _step(self, text: str, parts: _Parts) -> str | None:
        """Take text in the present state; returns what the next state has to take."""
        match self._state:
            case _State.START:
                return self._start(text)
            case _State.REASONING:
                return self._reason(text, parts)
            case _State.AFTER_TAG:
                text = text.lstrip("\r\n")
                if text:
                    self._state = _State.CONTENT
                return text
            case _State.CONTENT:
                return self._content(text, parts)
            case _State.CALL:
                return self._call(text, parts)

    def _start(self, text: str) -> str | None:
        visible = text.lstrip()
        if visible.startswith(THINK_OPEN):
            self._state = _State.REASONING
            return visible[len(THINK_OPEN) :]
        if THINK_OPEN.startswith(visible):
            self._held = text
            return None
        self._state = _State.CONTENT
        return text

    def _reason(self, text: str, parts: _Parts) -> str | None:
        if not self._any_reasoning:
            text = text.lstrip()
        tags = [THINK_CLOSE] if self._calls is None else [THINK_CLOSE, CALL_OPEN]
        found = [(start, tag) for tag in tags if (start := text.find(tag)) >= 0]
        if found:
            start, tag = min(found)
            parts.reasoning += text[:start].rstrip()
            # A call also ends a thought that was not closed.
            self._state = _State.AFTER_TAG if tag == THINK_CLOSE else _State.CALL
            return text[start + len(tag) :]
        certain = text[: min(hold_from(text, tag) for tag in tags)].rstrip()
        self._held = text[len(certain) :]
        self._any_reasoning = self._any_reasoning or bool(certain)
        parts.reasoning += certain
        return None

    def _content(self, text: str, parts: _Parts) -> str | None:
        if self._calls is None:
            self._add_content(text, parts)
            return None
        start = text.find(CALL_OPEN)
        if start >= 0:
            content = text[:start].rstrip()
            self._gap = text[len(content) : start]
            self._add_content(content, parts, len(text) - len(content))
            self._state = _State.CALL
            return text[start + len(CALL_OPEN) :]
        certain = text[: hold_from(text, CALL_OPEN)].rstrip()
        self._held = text[len(certain) :]
        self._add_content(certain, parts, len(self._held))
        return None

    def _call(self, text: str, parts: _Parts) -> str | None:
        assert self._calls is not None
        return self._after(self._calls.push(text), parts)

    def _after(self, step: CallStep, parts: _Parts) -> str | None:
        parts.calls += step.deltas
        if step.rest is None:
            return None
        if step.was_call:
            self._state = _State.AFTER_TAG
        else:
            self._state = _State.CONTENT
            self._add_content(self._gap + CALL_OPEN, parts, len(step.rest))
        self._gap = ""
        return step.rest


class _Parts:
    """A delta while it grows."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[CallDelta] = []

    def delta(self) -> ParsedDelta:
        return ParsedDelta(reasoning=self.reasoning, content=self.content, calls=tuple(self.calls))
