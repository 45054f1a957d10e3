"""How long each slot's draft chain may be: expected tokens per second from measured acceptance and times. Pure.

It decides cost alone: the engine's output does not depend on the depth (product.md D2).
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from msgspec import Struct

from engine.interface import MAX_SPEC, WindowTimes

_PRIOR_RATE = 0.8
_PRIOR_WEIGHT = 4.0
_ACCEPTANCE_DECAY = 0.98
_COST_DECAY = 0.99
_LONGEST_TIMES_EXPECTED = 2.0
"""A time counts as at most so many times the expected one: other load on the machine says nothing about a row."""
_SHORTEST_S = 1e-12
EXPLORE_EVERY = 16
"""Each so many windows all slots draft as deep as they may, so that a depth once given up is measured again: at once,
since a step of the draft layer for one chain costs most of what it costs for every slot's."""

Depths = tuple[float, ...]
"""One number per chain depth, 1 to MAX_SPEC."""
_ZEROS: Depths = (0.0,) * MAX_SPEC
_CERTAIN: Depths = (1.0,) * MAX_SPEC
_PRIOR_RATES: Depths = (_PRIOR_RATE,) * MAX_SPEC


class Acceptance(Struct, frozen=True, kw_only=True):
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
        num_tried = min(max_draft, num_accepted + 1)
        return Acceptance(
            allowed=_count(self.allowed, max_draft, max_draft),
            drafted=_count(self.drafted, max_draft, num_drafted),
            tried=_count(self.tried, num_tried, num_tried),
            accepted=_count(self.accepted, num_tried, num_accepted),
        )

    def survival(self, everyone: Acceptance) -> Depths:
        """P(the first d drafts are all accepted), leaning on everyone's rates while this sequence is young."""
        prior = _rates(everyone.accepted, everyone.tried, _PRIOR_RATES)
        return tuple(accumulate(_rates(self.accepted, self.tried, prior), mul))

    def reach(self, everyone: Acceptance) -> Depths:
        """P(draft d is made when allowed)."""
        prior = _rates(everyone.drafted, everyone.allowed, _CERTAIN)
        return _rates(self.drafted, self.allowed, prior)


def _count(counts: Depths, num_seen: int, num_hits: int) -> Depths:
    """Counts after an observation of the first num_seen depths, of which the first num_hits happened."""
    fresh = list(counts)
    for index in range(num_seen):
        fresh[index] = counts[index] * _ACCEPTANCE_DECAY + (index < num_hits)
    return tuple(fresh)


def _rates(hits: Depths, tries: Depths, prior: Depths) -> Depths:
    weight = _PRIOR_WEIGHT
    return tuple(
        [
            (hit + weight * expected) / (tried + weight)
            for hit, tried, expected in zip(hits, tries, prior, strict=True)
        ]
    )


class CostLine(Struct, frozen=True, kw_only=True):
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
        return self.fit()[1]

    @property
    def base_s(self) -> float:
        return self.fit()[0]

    def fit(self) -> tuple[float, float]:
        """(base_s, slope_s)."""
        if not self.is_measured:
            return 0.0, 0.0
        mean, mean_s = self.sum_amount / self.weight, self.sum_s / self.weight
        prior_s = self.prior_share * mean_s / (1.0 + self.prior_share * mean)
        variance = self.sum_amount_squared / self.weight - mean**2
        covariance = self.sum_amount_s / self.weight - mean * mean_s
        lean = _PRIOR_WEIGHT / self.weight
        slope_s = max(0.0, (covariance + lean * prior_s) / (variance + lean))
        if mean > 0.0:
            slope_s = min(slope_s, mean_s / mean)
        return max(0.0, (self.sum_s - slope_s * self.sum_amount) / self.weight), slope_s

    def observe(self, amount: int, seconds: float) -> CostLine:
        """The line after one more window."""
        if self.is_measured:
            base_s, slope_s = self.fit()
            seconds = min(seconds, _LONGEST_TIMES_EXPECTED * (base_s + slope_s * amount))
        return CostLine(
            prior_share=self.prior_share,
            weight=self.weight * _COST_DECAY + 1.0,
            sum_amount=self.sum_amount * _COST_DECAY + amount,
            sum_amount_squared=self.sum_amount_squared * _COST_DECAY + amount**2,
            sum_s=self.sum_s * _COST_DECAY + seconds,
            sum_amount_s=self.sum_amount_s * _COST_DECAY + amount * seconds,
        )


class WindowCosts(Struct, frozen=True, kw_only=True):
    """What windows were measured to cost."""

    verify: CostLine = CostLine(prior_share=0.05)
    """By rows."""
    draft: CostLine = CostLine(prior_share=1.0)
    """By steps of the draft layer; the base is its reading of the accepted tokens, which drafts do not add to."""
    rest: CostLine = CostLine(prior_share=0.0)
    """What a window takes beside the engine's work, of any amount: the way there and back, and whoever runs meanwhile.

    The more of it, the more a draft is worth that saves a window."""
    hidden: CostLine = CostLine(prior_share=0.0)
    """How long the engine can draft ahead, of any amount: from an answer to the next plan."""
    drafts_ahead: bool = False
    """The engine does so; only what is left then delays a window."""

    def beside_s(self, draft_s: float) -> float:
        """What a window takes beside its verification when its drafts take so long."""
        hidden_s = self.hidden.base_s if self.drafts_ahead else 0.0
        return self.rest.base_s + max(0.0, draft_s - hidden_s)

    def observe(
        self,
        *,
        num_rows: int,
        num_draft_steps: int,
        uses_drafts: bool,
        times: WindowTimes,
        rest_s: float | None = None,
        hidden_s: float | None = None,
    ) -> WindowCosts:
        """Costs after one more window with decode steps; uses_drafts: the draft layer ran at all; rest_s, hidden_s: if
        known."""
        verify = self.verify.observe(num_rows, times.verify_s)
        draft = self.draft.observe(num_draft_steps, times.draft_s) if uses_drafts else self.draft
        return WindowCosts(
            verify=verify,
            draft=draft,
            rest=_observed(self.rest, rest_s),
            hidden=_observed(self.hidden, hidden_s),
            drafts_ahead=times.ahead_s > 0.0 if uses_drafts else self.drafts_ahead,
        )


def _observed(line: CostLine, seconds: float | None) -> CostLine:
    return line if seconds is None else line.observe(0, max(seconds, _SHORTEST_S))


class DraftBid(Struct, frozen=True, kw_only=True):
    """A slot that will decode, and what its drafts are worth."""

    cap: int
    """Longest chain it may have."""
    survival: Depths
    reach: Depths


NO_DRAFTS = DraftBid(cap=0, survival=_ZEROS, reach=_ZEROS)


def choose_depths(bids: tuple[DraftBid, ...], costs: WindowCosts) -> tuple[int, ...]:
    """One depth per bid, together giving the most expected tokens per second.

    Each step of the draft layer is shared by the batch, so every longest chain is tried; below it, rows are added
    from the likeliest down while they raise the rate.
    """
    caps = tuple([bid.cap for bid in bids])
    if not costs.verify.is_measured or not any(caps):
        return caps
    verify_base_s, row_s = costs.verify.fit()
    verify_s = verify_base_s + row_s * len(bids)
    draft_s, step_s = costs.draft.fit()
    rows = _rows(bids)
    best = [0] * len(bids)
    best_rate = len(bids) / max(verify_s + costs.beside_s(draft_s), _SHORTEST_S)
    for longest in range(1, max(caps) + 1):
        draft_s += step_s * _step_share(bids, longest)
        seconds = verify_s + costs.beside_s(draft_s)
        rate, depths = _fill(bids, [row for row in rows if row[1] <= longest], seconds, row_s)
        if rate > best_rate:
            best, best_rate = depths, rate
    return tuple(best)


_Row = tuple[float, int, int]
"""A possible draft row: P(kept), depth, bid."""


def _fill(
    bids: tuple[DraftBid, ...], rows: list[_Row], seconds: float, row_s: float
) -> tuple[float, list[int]]:
    """(tokens per second, depths) of the best window of these rows; `seconds`: without any of them."""
    tokens = float(len(bids))
    depths = [0] * len(bids)
    for survival, depth, index in rows:
        if depths[index] != depth - 1:
            continue
        cost_s = row_s * bids[index].reach[depth - 1]
        if (tokens + survival) * seconds > tokens * (seconds + cost_s):
            depths[index] = depth
            tokens += survival
            seconds += cost_s
    return tokens / max(seconds, _SHORTEST_S), depths


def _step_share(bids: tuple[DraftBid, ...], depth: int) -> float:
    """P(the draft layer runs for draft `depth`): when any chain so long was not ended before it."""
    ended = 1.0
    for bid in bids:
        if bid.cap >= depth:
            ended *= 1.0 - (bid.reach[depth - 2] if depth > 1 else 1.0)
    return 1.0 - ended


def _rows(bids: tuple[DraftBid, ...]) -> list[_Row]:
    """Every possible draft row, likeliest first; a chain's rows stay in order."""
    rows = [
        (-survival, depth, index)
        for index, bid in enumerate(bids)
        for depth, survival in enumerate(bid.survival[: bid.cap], start=1)
    ]
    rows.sort()
    return [(-survival, depth, index) for survival, depth, index in rows]
