"""How long each slot's draft chain may be: expected tokens per second from measured acceptance and times. Pure.

It decides cost alone: the engine's output does not depend on the depth (product.md D2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul

from engine.interface import MAX_SPEC, WindowTimes

_PRIOR_RATE = 0.8
_PRIOR_WEIGHT = 4.0
_ACCEPTANCE_DECAY = 0.98
_COST_DECAY = 0.99
_LONGEST_TIMES_EXPECTED = 2.0
"""A time counts as at most so many times the expected one: other load on the machine says nothing about a row."""
EXPLORE_EVERY = 16
"""Each so many steps a slot drafts as deep as it may, so that a depth once given up is measured again."""

Depths = tuple[float, ...]
"""One number per chain depth, 1 to MAX_SPEC."""
_ZEROS: Depths = (0.0,) * MAX_SPEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Decayed counts by depth of how chains went."""

    allowed: Depths = _ZEROS
    """Steps that might have drafted so deep."""
    drafted: Depths = _ZEROS
    """... and did: the gate did not end the chain before."""
    tried: Depths = _ZEROS
    """Steps allowed so deep whose drafts before this one were all accepted."""
    accepted: Depths = _ZEROS
    """... and this one too."""

    def observe(self, *, max_draft: int, num_drafted: int, num_accepted: int) -> Acceptance:
        """Counts after one more decode step."""
        if max_draft == 0:
            return self
        depths = range(1, MAX_SPEC + 1)
        allowed = [depth <= max_draft for depth in depths]
        tried = [depth <= max_draft and num_accepted >= depth - 1 for depth in depths]
        return Acceptance(
            allowed=_count(self.allowed, allowed, allowed),
            drafted=_count(self.drafted, allowed, [num_drafted >= depth for depth in depths]),
            tried=_count(self.tried, tried, tried),
            accepted=_count(self.accepted, tried, [num_accepted >= depth for depth in depths]),
        )

    def survival(self, everyone: Acceptance) -> Depths:
        """P(the first d drafts are all accepted), leaning on everyone's rates while this sequence is young."""
        prior = _rates(everyone.accepted, everyone.tried, (_PRIOR_RATE,) * MAX_SPEC)
        return tuple(accumulate(_rates(self.accepted, self.tried, prior), mul))

    def reach(self, everyone: Acceptance) -> Depths:
        """P(draft d is made when allowed)."""
        prior = _rates(everyone.drafted, everyone.allowed, (1.0,) * MAX_SPEC)
        return _rates(self.drafted, self.allowed, prior)


def _count(counts: Depths, observed: list[bool], happened: list[bool]) -> Depths:
    return tuple(
        count * _ACCEPTANCE_DECAY + hit if seen else count
        for count, seen, hit in zip(counts, observed, happened, strict=True)
    )


def _rates(hits: Depths, tries: Depths, prior: Depths) -> Depths:
    return tuple(
        (hit + _PRIOR_WEIGHT * expected) / (tried + _PRIOR_WEIGHT)
        for hit, tried, expected in zip(hits, tries, prior, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """Seconds as base_s + slope_s * amount: decayed least squares.

    It leans on the prior share as if on some windows whose amounts differ by one, until real ones outweigh them.
    """

    prior_share: float
    """slope_s / base_s before anything is known."""
    weight: float = 0.0
    sum_amount: float = 0.0
    sum_amount_squared: float = 0.0
    sum_s: float = 0.0
    sum_amount_s: float = 0.0

    @property
    def is_measured(self) -> bool:
        return self.sum_s > 0.0

    @property
    def slope_s(self) -> float:
        """Never negative, and never so steep that the base would be."""
        if not self.is_measured:
            return 0.0
        mean, mean_s = self.sum_amount / self.weight, self.sum_s / self.weight
        prior_s = self.prior_share * mean_s / (1.0 + self.prior_share * mean)
        variance = self.sum_amount_squared / self.weight - mean**2
        covariance = self.sum_amount_s / self.weight - mean * mean_s
        lean = _PRIOR_WEIGHT / self.weight
        slope_s = max(0.0, (covariance + lean * prior_s) / (variance + lean))
        return min(slope_s, mean_s / mean) if mean > 0.0 else slope_s

    @property
    def base_s(self) -> float:
        if not self.is_measured:
            return 0.0
        return max(0.0, (self.sum_s - self.slope_s * self.sum_amount) / self.weight)

    def observe(self, amount: int, seconds: float) -> CostLine:
        """The line after one more window."""
        if self.is_measured:
            expected_s = self.base_s + self.slope_s * amount
            seconds = min(seconds, _LONGEST_TIMES_EXPECTED * expected_s)
        return replace(
            self,
            weight=self.weight * _COST_DECAY + 1.0,
            sum_amount=self.sum_amount * _COST_DECAY + amount,
            sum_amount_squared=self.sum_amount_squared * _COST_DECAY + amount**2,
            sum_s=self.sum_s * _COST_DECAY + seconds,
            sum_amount_s=self.sum_amount_s * _COST_DECAY + amount * seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCosts:
    """What windows were measured to cost."""

    verify: CostLine = CostLine(prior_share=0.05)
    """By rows."""
    draft: CostLine = CostLine(prior_share=1.0)
    """By steps of the draft layer; the base is its reading of the accepted tokens, which drafts do not add to."""

    def observe(
        self, *, num_rows: int, num_draft_steps: int, uses_drafts: bool, times: WindowTimes
    ) -> WindowCosts:
        """Costs after one more window with decode steps; uses_drafts: the draft layer ran at all."""
        verify = self.verify.observe(num_rows, times.verify_s)
        if not uses_drafts:
            return replace(self, verify=verify)
        return WindowCosts(verify=verify, draft=self.draft.observe(num_draft_steps, times.draft_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBid:
    """A slot that will decode, and what its drafts are worth."""

    cap: int
    """Longest chain it may have."""
    survival: Depths
    reach: Depths
    explore: bool = False
    """Draft to the cap whatever it costs."""


NO_DRAFTS = DraftBid(cap=0, survival=_ZEROS, reach=_ZEROS)


def choose_depths(bids: tuple[DraftBid, ...], costs: WindowCosts) -> tuple[int, ...]:
    """One depth per bid, together giving the most expected tokens per second.

    Each row of the draft layer is shared by the batch, so every longest chain is tried; below it, rows are added
    from the likeliest down while they raise the rate.
    """
    caps = tuple(bid.cap for bid in bids)
    if not costs.verify.is_measured or not any(caps):
        return caps
    candidates = [_fill(bids, costs, longest) for longest in range(max(caps, default=0) + 1)]
    _, depths = max(candidates, key=lambda candidate: candidate[0])
    return tuple(bid.cap if bid.explore else depth for bid, depth in zip(bids, depths, strict=True))


def _fill(bids: tuple[DraftBid, ...], costs: WindowCosts, longest: int) -> tuple[float, list[int]]:
    """(tokens per second, depths) of the best window whose chains are at most `longest`."""
    tokens, slope_s = float(len(bids)), costs.verify.slope_s
    seconds = (
        costs.verify.base_s
        + slope_s * len(bids)
        + costs.draft.base_s
        + costs.draft.slope_s * _num_steps(bids, longest)
    )
    depths = [0] * len(bids)
    for survival, depth, index in _rows(bids, longest):
        row_s = slope_s * bids[index].reach[depth - 1]
        worth = (tokens + survival) * seconds > tokens * (seconds + row_s)
        if worth and depths[index] == depth - 1:
            depths[index] = depth
            tokens, seconds = tokens + survival, seconds + row_s
    return tokens / max(seconds, 1e-12), depths


def _num_steps(bids: tuple[DraftBid, ...], longest: int) -> float:
    """Expected steps of the draft layer: step d runs when any slot's chain was not ended before draft d."""
    num_steps = 0.0
    for depth in range(longest):
        ended = (1.0 - (1.0, *bid.reach)[depth] for bid in bids if bid.cap > depth)
        num_steps += 1.0 - prod(ended)
    return num_steps


def _rows(bids: tuple[DraftBid, ...], longest: int) -> Iterable[tuple[float, int, int]]:
    """(P(kept), depth, bid) of every possible draft row, likeliest first; a chain's rows stay in order."""
    rows = [
        (bid.survival[depth - 1], depth, index)
        for index, bid in enumerate(bids)
        for depth in range(1, min(bid.cap, longest) + 1)
    ]
    return sorted(rows, key=lambda row: (-row[0], row[1]))
