"""Counters and histograms of the gateway, and the scheduler's snapshot, rendered as Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from gateway.errors import reply_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from gateway.limits import Allowance
    from scheduler.stats import DiskStats, SchedulerStats, StoreStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOTAL_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One registry per server, so that two in one process do not share numbers."""

    def __init__(self, stats: Callable[[], SchedulerStats]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_SchedulerCollector(stats))
        self._requests = Counter(
            "stratagate_requests",
            "Generation requests by endpoint and outcome: stop, length, cancelled or an error code.",
            ("endpoint", "outcome"),
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "stratagate_prompt_tokens",
            "Prompt tokens of accepted requests.",
            registry=self._registry,
        )
        self._request_tokens = Counter(
            "stratagate_request_tokens",
            "Tokens of ended requests by outcome; kind is prompt, or completion: what was delivered.",
            ("outcome", "kind"),
            registry=self._registry,
        )
        self.ttft = Histogram(
            "stratagate_time_to_first_token_seconds",
            "From the request's arrival to its first output token.",
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self.recent = RecentTokens()
        """Of all endpoints together."""
        self.tokens = _TokenCollector(self.recent)
        self._registry.register(self.tokens)
        self._total = Histogram(
            "stratagate_request_seconds",
            "From the request's arrival to its last token.",
            buckets=_TOTAL_BUCKETS_S,
            registry=self._registry,
        )

    def request_ended(
        self, endpoint: str, outcome: str, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Count a request once, however it ended."""
        self._requests.labels(endpoint, outcome).inc()
        self._request_tokens.labels(outcome, "prompt").inc(prompt_tokens)
        self._request_tokens.labels(outcome, "completion").inc(completion_tokens)

    def prompt_accepted(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def request_took(self, seconds: float) -> None:
        self._total.observe(seconds)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)


class RecentTokens:
    """Tokens delivered within the last few seconds, counted by the second."""

    window_s = 5

    def __init__(self) -> None:
        self._counts = [0] * self.window_s
        self._second = 0
        """The one that is being counted; the others of the ring lie before it."""
        self._place = 0
        """Its place."""
        self._ends_s = 1.0

    def add(self, now_s: float, num_tokens: int) -> None:
        if now_s >= self._ends_s:
            self._advance(int(now_s))
        self._counts[self._place] += num_tokens

    def per_s(self, now_s: float, uptime_s: float) -> float:
        """Tokens per second over the window, or since the start if that is shorter."""
        self._advance(int(now_s))
        counted_s = self.window_s - 1 + now_s % 1
        return sum(self._counts) / max(min(counted_s, uptime_s), 1.0)

    def _advance(self, second: int) -> None:
        """Forget the seconds that the ring's places stood for before."""
        for passed in range(self._second + 1, min(second, self._second + self.window_s) + 1):
            self._counts[passed % self.window_s] = 0
        self._second = max(second, self._second)
        self._place = self._second % self.window_s
        self._ends_s = self._second + 1.0


class Meter:
    """Times one request for the metrics."""

    def __init__(
        self,
        metrics: Metrics,
        endpoint: str,
        now: Callable[[], float],
        allowance: Allowance | None = None,
    ) -> None:
        """allowance: what the tokens are charged to."""
        self._allowance = allowance
        self._metrics = metrics
        self._tokens = metrics.tokens
        self._endpoint = endpoint
        self._now = now
        self._arrived_s = now()
        self._last_s: float | None = None
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._is_counted = False

    def accepted(self, prompt_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        if self._allowance is not None:
            self._allowance.charge(prompt_tokens)
        self._metrics.prompt_accepted(prompt_tokens)

    def delivered(self, num_tokens: int) -> None:
        """Called for every delivery with the tokens it brought."""
        if num_tokens == 0:
            return
        self._completion_tokens += num_tokens
        if self._allowance is not None:
            self._allowance.charge(num_tokens)
        now_s = self._now()
        if self._last_s is None:
            self._metrics.ttft.observe(now_s - self._arrived_s)
        self._tokens.delivered(num_tokens, now_s, self._last_s)
        self._last_s = now_s

    def ended(self, outcome: str) -> None:
        """Counts the request; only the first call does."""
        if self._is_counted:
            return
        self._is_counted = True
        self._metrics.request_ended(
            self._endpoint, outcome, self._prompt_tokens, self._completion_tokens
        )
        self._metrics.request_took(self._now() - self._arrived_s)

    def failed(self, error: BaseException) -> None:
        """Counts a request that got no answer, under the code of its error."""
        if isinstance(error, Exception) and not isinstance(error, ClientDisconnect):
            reply = reply_for(error)
            self.ended(reply.code or reply.type)
        else:
            self.ended("cancelled")


class _TokenCollector(Collector):
    """What is counted for every delivery: plain numbers, since the library's locks would cost as much as the text."""

    def __init__(self, recent: RecentTokens) -> None:
        self._recent = recent
        self.num_tokens = 0
        self._counts = [0] * (len(_GAP_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def delivered(self, num_tokens: int, now_s: float, last_s: float | None) -> None:
        """Count a delivery and, by token, the time since the one before, if there was one."""
        self.num_tokens += num_tokens
        self._recent.add(now_s, num_tokens)
        if last_s is None:
            return
        gap_s = (now_s - last_s) / num_tokens
        self._counts[bisect_left(_GAP_BUCKETS_S, gap_s)] += 1
        self._sum_s += gap_s

    @property
    def num_gaps(self) -> int:
        """Deliveries that had one before them."""
        return sum(self._counts)

    def collect(self) -> Iterator[Metric]:
        yield _counter(
            "completion_tokens", "Output tokens delivered, stop ids included.", self.num_tokens
        )
        bounds = [*map(str, _GAP_BUCKETS_S), "+Inf"]
        yield HistogramMetricFamily(
            "stratagate_inter_token_seconds",
            "Time between two deliveries divided by the tokens of the second; one observation per delivery.",
            buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum_s,
        )


class _SchedulerCollector(Collector):
    def __init__(self, stats: Callable[[], SchedulerStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        totals = stats.totals
        busy = sum(slot.request_id is not None for slot in stats.slots)
        yield _gauge("queue_length", "Requests waiting for a slot.", stats.queued)
        yield _gauge("slots", "Seats in the batch.", len(stats.slots))
        yield _gauge("slots_busy", "Seats taken.", busy)
        yield _gauge("engine_up", "1 when the engine is ready.", stats.engine_state == "ready")
        yield _gauge("draining", "1 while the server refuses new requests.", stats.draining)
        yield _counter("engine_restarts", "Engine processes started again.", stats.restarts)
        yield _counter("windows", "Windows run.", totals.windows)
        yield _counter("window_seconds", "Time spent in windows.", totals.window_s)
        yield _counter(
            "engine_prompt_tokens", "Prompt tokens read by the engine.", totals.prompt_tokens
        )
        yield _counter(
            "preemptions", "Decoding sequences that gave way to others.", totals.preemptions
        )
        if stats.parking is not None:
            yield from _parking(stats.parking)
        if stats.disk is not None:
            yield from _disk(stats.disk)
        yield _by_depth("drafts_offered", "Drafts that were verified.", totals.drafts_offered)
        yield _by_depth("drafts_accepted", "Drafts that were kept.", totals.drafts_accepted)
        yield _outcomes(stats)


def _disk(files: DiskStats) -> Iterator[Metric]:
    yield _gauge("disk_conversations", "Conversations that have files.", files.num_files)
    yield _gauge("disk_bytes", "Bytes of these files.", files.num_bytes)
    yield _gauge("disk_bytes_limit", "Most bytes of these files.", files.capacity_bytes)
    yield _counter("disk_written", "Conversation files written.", files.written)
    yield _counter("disk_hits", "Conversations read back from files.", files.hits)
    yield _counter("disk_evictions", "Conversation files deleted for others.", files.evictions)
    yield _counter(
        "disk_failures", "Files that could not be written, or were refused.", files.failures
    )


def _parking(store: StoreStats) -> Iterator[Metric]:
    yield _gauge("parked_conversations", "Conversations kept.", store.num_conversations)
    yield _gauge("parked_bytes", "Bytes kept for resuming.", store.num_bytes)
    yield _gauge("parked_bytes_limit", "Most bytes kept for resuming.", store.capacity_bytes)
    yield _counter("parking_lookups", "Prompts looked up in the store.", store.lookups)
    yield _counter("parking_hits", "Prompts that went on from it.", store.hits)
    yield _counter("resumed_tokens", "Prompt tokens not read again.", store.resumed_tokens)
    yield _counter("parking_evictions", "Conversations forgotten for others.", store.evictions)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"stratagate_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"stratagate_{name}", text, value=float(value))


def _by_depth(name: str, text: str, values: tuple[int, ...]) -> Metric:
    family = CounterMetricFamily(f"stratagate_{name}", text, labels=("depth",))
    for depth, value in enumerate(values, start=1):
        family.add_metric((str(depth),), value)
    return family


def _outcomes(stats: SchedulerStats) -> Metric:
    family = CounterMetricFamily(
        "stratagate_sequences", "Admitted sequences by how they ended.", labels=("outcome",)
    )
    for outcome, count in stats.totals.outcomes:
        family.add_metric((str(outcome),), count)
    return family
