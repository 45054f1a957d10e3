"""Token ids to text, as they come: whole characters only, and nothing of a stop string.

The text delivered is the same however the ids are split into pushes. A stop string counts as found at the first
character that completes one; of two that end there the one that began earlier is cut.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.tokenizer import Tokenizer
    from scheduler.messages import TokenLogprobs

_new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """A delivered token whose log-probabilities were asked for."""

    id: int
    logprobs: TokenLogprobs
    text_offset: int
    """Characters of the output before it."""
    text_end: int
    """... and with it."""


class TextDelta(Struct, frozen=True, gc=False):
    """Text that can be sent, and the tokens that made it."""

    text: str
    tokens: tuple[OutputToken, ...] = ()
    """Empty unless log-probabilities were asked for."""


class Detokenizer:
    """Text state of one sequence."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = _new_decoder(errors="replace")
        self._has_partial = False
        """The decoder holds the beginning of a character."""
        self._strip_space = tokenizer.strips_first_space
        self._stop = StopMatcher(stop)
        self.is_plain = not stop
        """There is no stop string to look for."""
        self._num_chars = 0
        """Characters decoded so far, held ones included."""
        self._pending: list[OutputToken] = []
        """Tokens not delivered yet."""
        self.num_tokens = 0
        """Tokens up to the one that completed a stop string."""
        self.stopped = False
        """A stop string was found; later ids are ignored."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stop.match

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> TextDelta:
        """Take new ids, give the text that is now certain."""
        if logprobs is None and self.is_plain:
            return TextDelta(self.plain_text(token_ids))
        released: list[str] = []
        for index, token_id in enumerate(token_ids):
            if self.stopped:
                break
            text = self._decode(self._token_bytes(token_id))
            self.num_tokens += 1
            if logprobs is not None:
                token = OutputToken(
                    id=token_id,
                    logprobs=logprobs[index],
                    text_offset=self._num_chars,
                    text_end=self._num_chars + len(text),
                )
                self._pending.append(token)
            self._num_chars += len(text)
            released.append(self._stop.push(text))
            self.stopped = self._stop.found
        return TextDelta(text="".join(released), tokens=self._release_tokens())

    def plain_text(self, token_ids: Sequence[int]) -> str:
        """The text of `push`, where there are neither stop strings nor log-probabilities."""
        self.num_tokens += len(token_ids)
        if len(token_ids) == 1:
            return self._decode(self._token_bytes(token_ids[0]))
        return self._decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> TextDelta:
        """No more ids come: what was held back, a broken character as U+FFFD."""
        if self.stopped:
            return TextDelta(text="")
        rest = self._decoder.decode(b"", final=True)
        self._num_chars += len(rest)
        text = self._stop.push(rest) + self._stop.finish()
        self.stopped = self._stop.found
        return TextDelta(text=text, tokens=self._release_tokens(is_last=True))

    def _decode(self, data: bytes) -> str:
        try:
            text = self._decode_partial(data) if self._has_partial else data.decode()
        except UnicodeDecodeError:
            # A character is broken, most often by the border between two tokens.
            text = self._decode_partial(data)
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def _decode_partial(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._has_partial = bool(self._decoder.getstate()[0])
        return text

    def _release_tokens(self, *, is_last: bool = False) -> tuple[OutputToken, ...]:
        """Tokens whose text is delivered; at a stop those that have a character before it."""
        if not self._pending:
            return ()
        end_of_text = self._stop.num_released
        if self.stopped:
            kept = [token for token in self._pending if token.text_offset < end_of_text]
            self._pending.clear()
            return tuple(kept)
        count = len(self._pending)
        if not is_last:
            count = sum(token.text_end <= end_of_text for token in self._pending)
        kept = self._pending[:count]
        del self._pending[:count]
        return tuple(kept)


class StopMatcher:
    """Holds back what may become a stop string; ends the text before the first one."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self.found = False
        self.match: str | None = None
        """The string that was found."""
        self.num_released = 0
        """Characters given out."""
        self._held = ""

    def push(self, text: str) -> str:
        """Text that is certain to be kept."""
        if not self.strings:
            self.num_released += len(text)
            return text
        if not text:
            return ""
        text = self._held + text
        cut = self._first_stop(text)
        if cut is not None:
            self.found = True
        else:
            cut = self._hold_from(text)
        self._held = text[cut:]
        self.num_released += cut
        return text[:cut]

    def finish(self) -> str:
        """The held text: it did not become a stop string."""
        self.num_released += len(self._held)
        text, self._held = self._held, ""
        return text

    def _first_stop(self, text: str) -> int | None:
        hits = [(text.find(stop), stop) for stop in self.strings]
        spans = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        if not spans:
            return None
        _, start, self.match = min(spans)
        return start

    def _hold_from(self, text: str) -> int:
        """Where the longest end of the text begins that is the beginning of a stop string."""
        return min(hold_from(text, stop) for stop in self.strings)


def hold_from(text: str, wanted: str) -> int:
    """Start of the longest proper prefix of `wanted` that `text` ends with; len(text) if none."""
    position = max(0, len(text) - len(wanted) + 1)
    while (position := text.find(wanted[0], position)) >= 0:
        if wanted.startswith(text[position:]):
            return position
        position += 1
    return len(text)
