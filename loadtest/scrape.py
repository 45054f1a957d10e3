"""Samples a server's Prometheus /metrics while it is under load. A server without one is simply not sampled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

# Families of stratagate; other servers report their own names and yield samples without these.
_SLOTS = "stratagate_slots"
_SLOTS_BUSY = "stratagate_slots_busy"
_QUEUE = "stratagate_queue_length"
_OFFERED = "stratagate_drafts_offered_total"
_ACCEPTED = "stratagate_drafts_accepted_total"
_PROMPT_TOKENS = "stratagate_prompt_tokens_total"
_COMPLETION_TOKENS = "stratagate_completion_tokens_total"
_REQUESTS = "stratagate_requests_total"
_REQUEST_TOKENS = "stratagate_request_tokens_total"
_RESTARTS = "stratagate_engine_restarts_total"
_ENGINE_UP = "stratagate_engine_up"
_PARKED_BYTES = "stratagate_parked_bytes"

Counts = tuple[tuple[str, float], ...]
"""By the value of one label, counted from the server's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a server said of itself at one moment."""

    time_s: float
    slots: float | None
    slots_busy: float | None
    queue_length: float | None
    prompt_tokens: float
    completion_tokens: float
    drafts_offered: Counts
    """By depth."""
    drafts_accepted: Counts
    requests: Counts
    """By outcome, over all endpoints; so are the next two."""
    request_prompt_tokens: Counts
    request_completion_tokens: Counts
    engine_restarts: float
    engine_up: bool
    parked_bytes: float
    """Kept for conversations to go on: part of the engine's memory."""

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits, and something could."""
        return self.engine_up and not self.slots_busy and not self.queue_length


def parse(text: str, *, time_s: float) -> Sample:
    """Read the exposition text. Raises ValueError if it is none."""
    values: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))

    def single(name: str) -> float | None:
        return sum(value for _, value in values[name]) if name in values else None

    def by_label(name: str, label: str, **only: str) -> Counts:
        sums: dict[str, float] = {}
        for labels, value in values.get(name, []):
            if only.items() <= labels.items():
                sums[labels.get(label, "")] = sums.get(labels.get(label, ""), 0.0) + value
        return tuple(sorted(sums.items()))

    return Sample(
        time_s=time_s,
        slots=single(_SLOTS),
        slots_busy=single(_SLOTS_BUSY),
        queue_length=single(_QUEUE),
        prompt_tokens=single(_PROMPT_TOKENS) or 0.0,
        completion_tokens=single(_COMPLETION_TOKENS) or 0.0,
        drafts_offered=by_label(_OFFERED, "depth"),
        drafts_accepted=by_label(_ACCEPTED, "depth"),
        requests=by_label(_REQUESTS, "outcome"),
        request_prompt_tokens=by_label(_REQUEST_TOKENS, "outcome", kind="prompt"),
        request_completion_tokens=by_label(_REQUEST_TOKENS, "outcome", kind="completion"),
        engine_restarts=single(_RESTARTS) or 0.0,
        engine_up=single(_ENGINE_UP) != 0.0,
        parked_bytes=single(_PARKED_BYTES) or 0.0,
    )


def acceptance(before: Sample, after: Sample) -> tuple[tuple[str, float, float], ...]:
    """(depth, verified drafts, accepted drafts) between two samples."""
    offered_before, accepted_before = dict(before.drafts_offered), dict(before.drafts_accepted)
    accepted_after = dict(after.drafts_accepted)
    return tuple(
        (
            depth,
            offered - offered_before.get(depth, 0.0),
            accepted_after.get(depth, 0.0) - accepted_before.get(depth, 0.0),
        )
        for depth, offered in after.drafts_offered
    )


def acceptance_rate(before: Sample, after: Sample) -> float | None:
    """Accepted of verified drafts over all depths; None when none was verified."""
    rows = acceptance(before, after)
    offered = sum(row[1] for row in rows)
    return sum(row[2] for row in rows) / offered if offered else None


async def fetch(http: httpx.AsyncClient, root_url: str) -> Sample | None:
    """One sample, or None when the server has no metrics."""
    try:
        response = await http.get(f"{root_url}/metrics", timeout=5.0)
        if response.status_code != 200:
            return None
        return parse(response.text, time_s=asyncio.get_running_loop().time())
    except (httpx.HTTPError, ValueError):
        return None
