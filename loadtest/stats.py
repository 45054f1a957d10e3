"""From records to figures. Pure arithmetic: everything here is checked against hand-made records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.client import Outcome, RequestRecord

if TYPE_CHECKING:
    from loadtest.config import Slo
    from loadtest.driver import Stage

PERCENTILES = (50, 75, 90, 95, 99, 99.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of one metric, in seconds."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: tuple[float, ...]
    """At PERCENTILES."""

    def at(self, percentile: float) -> float:
        return self.percentiles[PERCENTILES.index(percentile)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one stage, over its measured window: from the end of warm-up to the end of full load."""

    name: str
    concurrency: int | None
    window_s: float
    num_requests: int
    outcomes: tuple[tuple[str, int], ...]
    num_unexpected: int
    num_usage_checked: int
    num_usage_wrong: int
    """Whole streams whose usage is missing, or smaller than the number of their chunks."""
    prompt_tokens: int
    """Read in the window: usage of the requests whose first chunk fell into it."""
    completion_tokens: int
    """Written in the window; a request's tokens are spread evenly over its chunks."""
    cached_tokens: int
    num_chunks: int
    num_good: int
    """Succeeded and met every SLO."""
    num_ok_inside: int
    """Succeeded, and ended within the window."""
    num_good_inside: int
    distributions: tuple[tuple[str, Distribution], ...]

    @property
    def requests_per_s(self) -> float:
        return self.num_ok_inside / self.window_s if self.window_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.window_s if self.window_s else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.window_s if self.window_s else 0.0

    @property
    def goodput_per_s(self) -> float:
        return self.num_good_inside / self.window_s if self.window_s else 0.0

    @property
    def good_share(self) -> float:
        """Of the requests that were meant to succeed."""
        return self.num_good / self.num_requests if self.num_requests else 0.0

    @property
    def num_ok(self) -> int:
        return dict(self.outcomes).get(Outcome.OK, 0)

    def get(self, metric: str) -> Distribution | None:
        return dict(self.distributions).get(metric)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, interpolated linearly between the two nearest ranks."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Iterable[float]) -> Distribution | None:
    """None when there is no value."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        minimum=ordered[0],
        maximum=ordered[-1],
        percentiles=tuple(percentile(ordered, percent) for percent in PERCENTILES),
    )


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Succeeded, and no value of a limited metric is above its limit. A request's ITL is its longest gap."""
    if record.outcome is not Outcome.OK:
        return False
    values = {
        "ttft": record.ttft_s,
        "itl": max(record.gaps_s, default=0.0),
        "tpot": record.tpot_s or 0.0,
        "e2e": record.e2e_s,
    }
    for name, limit in slo.limits:
        value = values[name]
        if value is None or value > limit:
            return False
    return True


def summarize(stage: Stage, *, warmup_s: float, slo: Slo) -> Summary:
    """Figures of the requests meant to start after the warm-up, and of the tokens that arrived after it."""
    window_start_s, window_end_s = stage.start_s + warmup_s, stage.measured_until_s
    measured = [record for record in stage.records if record.intended_start_s >= window_start_s]
    ok = [record for record in measured if record.outcome is Outcome.OK]
    outcomes = Counter(record.label for record in measured)
    checks = [record.usage_agrees for record in measured]
    good = [record for record in ok if is_good(record, slo)]
    # Prompt tokens by the moment they had been read, output tokens by the moment each arrived: a request that was
    # half done at an end of the window counts with the half that lies in it.
    arrived = [
        (record, sum(window_start_s <= time_s <= window_end_s for time_s in record.chunk_times_s))
        for record in stage.records
    ]
    read_inside = [
        record
        for record in stage.records
        if record.chunk_times_s and window_start_s <= record.chunk_times_s[0] <= window_end_s
    ]
    metrics = {
        "ttft": [record.ttft_s for record in ok if record.ttft_s is not None],
        "itl": [gap for record in ok for gap in record.gaps_s],
        "tpot": [record.tpot_s for record in ok if record.tpot_s is not None],
        "e2e": [record.e2e_s for record in ok],
        "late": [record.late_s for record in measured],
    }
    return Summary(
        name=stage.name,
        concurrency=stage.concurrency,
        window_s=max(0.0, window_end_s - window_start_s),
        num_requests=len(measured),
        outcomes=tuple(sorted(outcomes.items())),
        num_unexpected=sum(not record.expected for record in measured),
        num_usage_checked=sum(check is not None for check in checks),
        num_usage_wrong=sum(check is False for check in checks),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in read_inside),
        completion_tokens=round(math.fsum(_tokens(record, chunks) for record, chunks in arrived)),
        cached_tokens=sum(record.cached_tokens or 0 for record in read_inside),
        num_chunks=sum(chunks for _, chunks in arrived),
        num_good=len(good),
        num_ok_inside=sum(record.end_s <= window_end_s for record in ok),
        num_good_inside=sum(record.end_s <= window_end_s for record in good),
        distributions=tuple(
            (name, found) for name, values in metrics.items() if (found := distribution(values))
        ),
    )


def _tokens(record: RequestRecord, num_chunks: int) -> float:
    """Output tokens in `num_chunks` of a record's chunks; a request without usage counts its chunks."""
    if not record.chunk_times_s:
        return 0.0
    total = record.completion_tokens
    return num_chunks * (total if total is not None else num_chunks) / len(record.chunk_times_s)


def tokens_over_time(stage: Stage, bin_s: float) -> list[tuple[float, float]]:
    """(seconds after the start of the stage, output tokens per second) for each bin."""
    num_bins = max(1, math.ceil((stage.end_s - stage.start_s) / bin_s))
    bins = [0.0] * num_bins
    for record in stage.records:
        for time_s in record.chunk_times_s:
            index = min(num_bins - 1, int((time_s - stage.start_s) / bin_s))
            bins[index] += _tokens(record, 1)
    return [((index + 0.5) * bin_s, tokens / bin_s) for index, tokens in enumerate(bins)]
