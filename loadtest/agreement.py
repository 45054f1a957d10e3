"""Whether an idle server's counters say the same as its clients, to the token.

A client that heard the end of its answer knows its outcome and its tokens: these must be equal. One that left, or
whose connection broke, bounds what the server may have counted for it: at least what the client had read, at most
what it had asked for.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from loadtest.client import Outcome, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.scrape import Counts, Sample

CANARY = "canary"
"""The kind of requests that all ask the same, greedily: their answers must be the same."""

_COMPLETE = ("stop", "length")


def disagreements(
    before: Sample, after: Sample, records: Sequence[RequestRecord], *, num_kills: int = 0
) -> list[str]:
    """What is said differently; empty when all agrees.

    Both samples must be taken while nothing runs, and nobody else may use the server in between. `num_kills`: engines
    that were killed on purpose.
    """
    return [
        *_left_over(after),
        *_requests(before, after, records),
        *_tokens("prompt", before.request_prompt_tokens, after.request_prompt_tokens, records),
        *_tokens(
            "output", before.request_completion_tokens, after.request_completion_tokens, records
        ),
        *_sums(before, after),
        *_restarts(after.engine_restarts - before.engine_restarts, num_kills),
        *_without_retry_after(records),
        *_changed_answers(records),
    ]


def heard_outcome(record: RequestRecord) -> str | None:
    """What a stratagate server calls the end of this request; None when its client did not hear it."""
    if record.outcome is Outcome.OK:
        return "length" if record.finish_reason == "length" else "stop"
    return record.error_code


def _left_over(after: Sample) -> list[str]:
    if not after.slots_busy and not after.queue_length:
        return []
    return [f"{after.slots_busy:g} slots busy, {after.queue_length or 0:g} requests queued"]


def _requests(before: Sample, after: Sample, records: Sequence[RequestRecord]) -> list[str]:
    counted = _difference(before.requests, after.requests)
    heard = Counter(heard_outcome(record) for record in records)
    unheard = heard.pop(None, 0)
    # Of a connection that was lost before any answer, the server may not know.
    lost = sum(record.outcome is Outcome.CONNECTION for record in records)
    found: list[str] = []
    if not len(records) - lost <= sum(counted.values()) <= len(records):
        found.append(
            f"the server counted {sum(counted.values()):g} requests, the clients {len(records) - lost}"
        )
    found += [
        f"the server counted {counted.get(name, 0.0):g} requests that ended with {name}, "
        f"the clients {heard[name]}"
        for name in sorted({*counted, *(name for name in heard if name is not None)})
        if not 0 <= counted.get(name, 0.0) - heard[name] <= unheard
    ]
    return found


def _tokens(
    kind: str, before: Counts, after: Counts, records: Sequence[RequestRecord]
) -> list[str]:
    counted = _difference(before, after)
    complete = sum(counted.get(name, 0.0) for name in _COMPLETE)
    whole = [record for record in records if record.outcome is Outcome.OK]
    cut = [record for record in records if _may_have_cost(record)]
    used = sum(_usage(kind, record) for record in whole)
    seen = sum(_usage(kind, record) for record in cut)
    # Some that left may have had a complete answer on its way.
    exact = not any(record.status == 200 and heard_outcome(record) is None for record in cut)
    if complete < used or (complete > used and exact):
        return [
            f"the server counted {complete:g} {kind} tokens of complete answers, the clients {used}"
        ]
    rest = sum(counted.values()) - used
    most = sum(record.max_tokens for record in cut) if kind == "output" else float("inf")
    if not seen <= rest <= (most if cut else 0):
        return [
            f"the server counted {rest:g} {kind} tokens of answers cut short, "
            f"of which the clients read {seen} and had asked for {most:g}"
        ]
    return []


def _may_have_cost(record: RequestRecord) -> bool:
    """Not complete, and not refused for what it asks."""
    return record.outcome is not Outcome.OK and record.status in (None, 200, 500, 503, 504)


def _usage(kind: str, record: RequestRecord) -> int:
    if kind == "prompt":
        return record.prompt_tokens or 0
    tokens = record.completion_tokens
    return len(record.chunk_times_s) if tokens is None else tokens


def _sums(before: Sample, after: Sample) -> list[str]:
    """Tokens counted as they come against those counted as requests end."""
    return [
        f"the server counted {total:g} {kind} tokens, and {ended:g} by outcome"
        for kind, total, ended in (
            (
                "prompt",
                after.prompt_tokens - before.prompt_tokens,
                sum(
                    _difference(before.request_prompt_tokens, after.request_prompt_tokens).values()
                ),
            ),
            (
                "output",
                after.completion_tokens - before.completion_tokens,
                sum(
                    _difference(
                        before.request_completion_tokens, after.request_completion_tokens
                    ).values()
                ),
            ),
        )
        if total != ended
    ]


def _restarts(restarts: float, num_kills: int) -> list[str]:
    if restarts == num_kills:
        return []
    return [f"the server counted {restarts:g} engine restarts, {num_kills} engines were killed"]


def _without_retry_after(records: Sequence[RequestRecord]) -> list[str]:
    count = sum(r.status in (429, 503) and r.retry_after is None for r in records)
    return [f"{count} answers 429 or 503 without Retry-After"] if count else []


def _changed_answers(records: Sequence[RequestRecord]) -> list[str]:
    answers = Counter(
        (record.reasoning, record.text)
        for record in records
        if record.kind == CANARY and record.outcome is Outcome.OK
    )
    if len(answers) <= 1:
        return []
    return [
        f"{len(answers)} different answers to the same greedy question, {answers.total()} times"
    ]


def _difference(before: Counts, after: Counts) -> dict[str, float]:
    earlier = dict(before)
    return {name: count - earlier.get(name, 0.0) for name, count in after}
