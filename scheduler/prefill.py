"""How prompts are read: where a prompt is cut, whose chunk goes next, how much decoding is owed. Pure.

The cuts are a rule on the prompt's ids alone, never on load (product.md D3); load decides only when a chunk runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.interface import WindowTimes


def chunk_end(
    prompt_ids: tuple[int, ...], start: int, *, chunk_tokens: int, turn_token_id: int | None
) -> int:
    """Where the chunk that begins at `start` ends: at a multiple of chunk_tokens, before the next turn token, or
    at the prompt's end, whatever comes first."""
    limit = min(len(prompt_ids), (start // chunk_tokens + 1) * chunk_tokens)
    if turn_token_id is None:
        return limit
    try:
        return prompt_ids.index(turn_token_id, start + 1, limit)
    except ValueError:
        return limit


def is_cut(
    prompt_ids: tuple[int, ...], position: int, *, chunk_tokens: int, turn_token_id: int | None
) -> bool:
    """Whether a chunk of the prompt ends at `position`, which lies inside the prompt."""
    return position % chunk_tokens == 0 or prompt_ids[position] == turn_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBid:
    """A prompt that wants its next chunk read."""

    slot: int
    next_tokens: int
    """Length of the next chunk."""
    unread_tokens: int
    priority: int
    num_passes: int
    arrival: int


def pick_chunks(
    bids: Iterable[PromptBid], *, budget_tokens: int, max_passes: int
) -> tuple[int, ...]:
    """The slots whose next chunk is read in this window, in reading order: always one, more while they fit.

    First those that were passed over too often, then by priority, then what is read soonest. A prompt therefore
    waits for at most `max_passes` windows with chunks, plus one for each other prompt that has aged too.
    """

    def rank(bid: PromptBid) -> tuple[int, int, int, int]:
        aged = bid.num_passes if bid.num_passes >= max_passes else 0
        return -aged, -bid.priority, bid.unread_tokens, bid.arrival

    picked: list[int] = []
    left = budget_tokens
    for bid in sorted(bids, key=rank):
        if picked and bid.next_tokens > left:
            continue
        picked.append(bid.slot)
        left -= bid.next_tokens
    return tuple(picked)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    """Keeps the balance between reading and decoding while both are wanted.

    After a chunk of t seconds the running slots are owed decode_share * t seconds of windows without chunks.
    """

    decode_share: float
    owed_s: float = 0.0

    def may_read(self, *, has_decodes: bool) -> bool:
        return not has_decodes or self.owed_s <= 0.0

    def after(self, times: WindowTimes, *, has_decodes: bool) -> ReadShare:
        """The balance after a window that took `times`."""
        if self.owed_s == 0.0 and times.prefill_s == 0.0:
            return self
        if not has_decodes:
            return replace(self, owed_s=0.0)
        decode_s = times.draft_s + times.verify_s
        owed_s = self.owed_s + self.decode_share * times.prefill_s - decode_s
        return replace(self, owed_s=max(0.0, owed_s))
