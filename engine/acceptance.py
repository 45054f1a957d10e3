"""Target picks against drafts -> the tokens a window yields (product.md D2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a slot's window yields."""

    token_ids: tuple[int, ...]
    """Accepted drafts and the bonus, cut after the first stop id; as many rows are kept as there are ids."""
    num_accepted: int
    """Drafts equal to the target's pick, before the cut."""


def accept(picks: Sequence[int], drafts: Sequence[int], stop_ids: frozenset[int]) -> Accepted:
    """picks: the target's pick at each of len(drafts) + 1 rows; row i saw the first i drafts.

    Oracle: engine/reference/acceptance.py.
    """
    num_accepted = 0
    for pick, draft in zip(picks, drafts, strict=False):
        if pick != draft:
            break
        num_accepted += 1
    kept: list[int] = []
    for pick in picks[: num_accepted + 1]:
        kept.append(pick)
        if pick in stop_ids:
            break
    return Accepted(token_ids=tuple(kept), num_accepted=num_accepted)
