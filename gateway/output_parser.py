"""Output text to reasoning and content: a small state machine that any split of the text leads to the same end.

Knows the tags of the model family, nothing of tokens or HTTP. White space around the thought and the newlines after
it belong to the format, not to the text, and are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from gateway.detokenize import hold_from

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDelta:
    """New text of each part; a thought always precedes the content."""

    reasoning: str = ""
    content: str = ""


class _State(Enum):
    START = auto()
    """Nothing but white space so far: a thought may still open."""
    REASONING = auto()
    CONTENT_START = auto()
    """Behind a thought: newlines are dropped."""
    CONTENT = auto()


class OutputParser:
    """Parser state of one answer."""

    def __init__(self, *, in_thought: bool) -> None:
        """in_thought: the prompt has opened the thought already."""
        self._state = _State.REASONING if in_thought else _State.START
        self._held = ""
        self._any_reasoning = False

    def push(self, text: str) -> ParsedDelta:
        """Parts that are now certain."""
        if self._state is _State.CONTENT:
            return ParsedDelta(content=text)
        text = self._held + text
        self._held = ""
        reasoning = ""
        if self._state is _State.START:
            text = self._start(text)
        if self._state is _State.REASONING:
            reasoning, text = self._reason(text)
        if self._state is _State.CONTENT_START:
            text = text.lstrip("\r\n")
            if text:
                self._state = _State.CONTENT
        return ParsedDelta(reasoning=reasoning, content=text)

    def finish(self) -> ParsedDelta:
        """What was held back: it did not become a tag."""
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            return ParsedDelta(reasoning=held.rstrip())
        return ParsedDelta(content=held)

    def _start(self, text: str) -> str:
        """Returns what is left to parse after the state was settled, if it was."""
        visible = text.lstrip()
        if visible.startswith(THINK_OPEN):
            self._state = _State.REASONING
            return visible[len(THINK_OPEN) :]
        if THINK_OPEN.startswith(visible):
            self._held = text
            return ""
        self._state = _State.CONTENT
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """Returns new reasoning, and the text behind the thought if it ended."""
        if not self._any_reasoning:
            text = text.lstrip()
        end = text.find(THINK_CLOSE)
        if end >= 0:
            self._state = _State.CONTENT_START
            return text[:end].rstrip(), text[end + len(THINK_CLOSE) :]
        certain = text[: hold_from(text, THINK_CLOSE)].rstrip()
        self._held = text[len(certain) :]
        self._any_reasoning = self._any_reasoning or bool(certain)
        return certain, ""
