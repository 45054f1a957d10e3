"""Which conversation goes first: superseded copies, then the least reuse value per byte. Pure.

Value follows GreedyDual-Size-Frequency (Cherkasova, 1998): (uses + 1) * tokens saved / bytes freed, above a floor that
rises to the value of whatever was evicted, so that what was valuable long ago does not stay for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A parked conversation as eviction sees it."""

    index: int
    is_superseded: bool
    """Another conversation of the same owner begins with all of its tokens."""
    saved_tokens: int
    """Prompt tokens that need not be read when it is resumed."""
    freed_bytes: int
    """What only it holds."""
    num_uses: int
    last_used: int
    floor: float

    @property
    def value(self) -> float:
        """Tokens per byte, aged."""
        return self.floor + (self.num_uses + 1) * self.saved_tokens / max(1, self.freed_bytes)


def choose_victim(candidates: Iterable[Candidate]) -> Candidate:
    """Who goes first; at least one candidate is needed."""

    def rank(candidate: Candidate) -> tuple[bool, float, int]:
        if candidate.is_superseded:
            return False, 0.0, candidate.last_used
        return True, candidate.value, candidate.last_used

    return min(candidates, key=rank)
