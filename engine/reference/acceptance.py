"""Which drafts stand (product.md D2): those that equal what the target itself picks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Outcome of one slot's verify window."""

    token_ids: tuple[int, ...]
    """New tokens: accepted drafts and the bonus, nothing after the first stop id."""
    num_accepted: int
    """Drafts equal to the target's picks, before the cut."""


def accept(drafts: Sequence[int], picks: Sequence[int], stop_ids: Collection[int] = ()) -> Accepted:
    """Keep the longest draft prefix that equals the picks, then the next pick; end after a stop id.

    picks[j] is the target's pick after drafts[:j]; there is one more pick than drafts.
    """
    if len(picks) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} picks, not {len(picks)}")
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == picks[num_accepted]:
        num_accepted += 1
    token_ids: list[int] = []
    for token_id in picks[: num_accepted + 1]:
        token_ids.append(token_id)
        if token_id in stop_ids:
            break
    return Accepted(token_ids=tuple(token_ids), num_accepted=num_accepted)
