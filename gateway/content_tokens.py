"""Which tokens of an answer made its content, for APIs that give log-probabilities of the text alone.

Works with places in the output's characters: the parser says which of them became content, a token where its own are.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.detokenize import OutputToken


class ContentSpans:
    """Half-open ranges of an output's characters that became content."""

    def __init__(self) -> None:
        self.num_decided = 0
        """What becomes of the characters before this place is known."""
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """One more range, behind all others; what lies before its end is decided then."""
        self.num_decided = end
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = end
        elif end > start:
            self._starts.append(start)
            self._ends.append(end)

    def touches(self, start: int, end: int) -> bool:
        """Whether a character of [start, end) is content; of an empty range, the one that follows it."""
        last = bisect_right(self._starts, max(start, end - 1)) - 1
        return last >= 0 and self._ends[last] > start


class ContentTokens:
    """Takes an answer's tokens as they are delivered and gives those of its content once that is certain."""

    def __init__(self, spans: ContentSpans) -> None:
        self._spans = spans
        self._waiting: list[OutputToken] = []

    def push(self, tokens: Iterable[OutputToken], *, is_last: bool) -> list[OutputToken]:
        """More tokens, in order; with the last ones everything is certain."""
        self._waiting += tokens
        known = self._spans.num_decided
        count = len(self._waiting)
        if not is_last:
            # A token without characters is a part of the next character.
            count = sum(
                token.text_end <= known and token.text_offset < known for token in self._waiting
            )
        decided, self._waiting = self._waiting[:count], self._waiting[count:]
        return [t for t in decided if self._spans.touches(t.text_offset, t.text_end)]
