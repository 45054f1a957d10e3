"""What is kept of one conversation: its tokens, and which ids hold its state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """Token ids packed to 4 bytes each, so that prefixes are compared by whole blocks of memory."""

    packed: bytes

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> TokenPrefix:
        return cls(array("I", token_ids).tobytes())

    def __len__(self) -> int:
        return len(self.packed) // _ID_BYTES

    def first(self, num_tokens: int) -> TokenPrefix:
        return TokenPrefix(self.packed[: num_tokens * _ID_BYTES])

    def between(self, start: int, end: int) -> bytes:
        """The packed ids of positions [start, end)."""
        return self.packed[start * _ID_BYTES : end * _ID_BYTES]

    def begins_with(self, other: TokenPrefix) -> bool:
        return self.packed.startswith(other.packed)

    def agrees(self, other: TokenPrefix, start: int, end: int) -> bool:
        """Whether both have all positions [start, end) and the same ids there."""
        if min(len(self), len(other)) < end:
            return False
        first = start * _ID_BYTES
        # Much faster than comparing views, which go byte by byte.
        return self.packed.startswith(other.packed[first : end * _ID_BYTES], first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Running state after the first `position` tokens."""

    position: int
    checkpoint_id: int


@dataclass(slots=True, kw_only=True, eq=False)
class ParkedConversation:
    """A conversation in the store. Only the store changes it."""

    owner: str
    tokens: TokenPrefix
    """Up to the last checkpoint: what lies behind cannot be resumed."""
    checkpoints: tuple[Checkpoint, ...]
    """By position, at least one."""
    page_ids: tuple[int, ...]
    """All positions of `tokens`, in order; the last page may be partly used."""
    num_uses: int = 0
    """How often it was resumed."""
    last_used: int = 0
    """On the store's own clock: a count of puts and hits."""
    floor: float = 0.0
    """What the value of everything evicted so far was when it was used last."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)
