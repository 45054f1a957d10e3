"""How many clients a server carries: doubles them until its output stops growing, then names the knee. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.stats import Summary

GAIN = 1.05
"""A stage that makes less than this times the best tokens/s before it has gained nothing."""
PATIENCE = 2
"""So many stages without gain end the ramp: one may be bad luck, and the second shows how TTFT grows."""
NEAR_BEST = 0.9
"""The knee is the smallest stage with at least this share of the best tokens/s."""


def next_clients(summaries: Sequence[Summary], *, most: int) -> int | None:
    """Clients of the next stage: one, then twice as many each time; None when that is enough."""
    if not summaries:
        return 1
    if _stages_without_gain(summaries) >= PATIENCE:
        return None
    clients = 2 * (summaries[-1].concurrency or 0)
    return clients if clients <= most else None


def knee(summaries: Sequence[Summary]) -> Summary | None:
    """The stage beyond which more clients wait longer and get hardly more; None when nothing was answered."""
    best = max((summary.tokens_per_s for summary in summaries), default=0.0)
    if not best:
        return None
    return next(s for s in summaries if s.tokens_per_s >= NEAR_BEST * best)


def is_saturated(summaries: Sequence[Summary]) -> bool:
    """Whether the last stage, with more clients than the knee, made hardly more: the knee is seen from both sides."""
    found = knee(summaries)
    return found is not None and found is not summaries[-1]


def capacity(summaries: Sequence[Summary], *, share: float) -> Summary | None:
    """The largest stage up to which `share` of the requests were good in every stage."""
    met = itertools.takewhile(lambda s: s.num_requests and s.good_share >= share, summaries)
    return max(met, key=lambda s: s.concurrency or 0, default=None)


def _stages_without_gain(summaries: Sequence[Summary]) -> int:
    best, count = 0.0, 0
    for summary in summaries:
        if summary.tokens_per_s >= GAIN * best and summary.tokens_per_s:
            count = 0
        else:
            count += 1
        best = max(best, summary.tokens_per_s)
    return count
