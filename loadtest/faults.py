"""Clients that misbehave, and what a server must answer them: one expected outcome (or few) for each request.

Also compares what the server counted with what the clients saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loadtest.client import Outcome, RequestPlan, RequestRecord
from loadtest.driver import chat_body
from loadtest.workload import random_text

if TYPE_CHECKING:
    from random import Random

    from loadtest.scrape import Sample

BAD_REQUEST = "http_error 400"
NOT_FOUND = "http_error 404"
TOO_LARGE = "http_error 413"
TOO_MANY = "http_error 429"

# How often each kind appears; most requests are ordinary, so that faults meet real work.
_MIX = {
    "chat": 8,
    "whole": 2,
    "disconnect": 4,
    "slow reader": 2,
    "malformed": 3,
    "oversize": 1,
    "wrong model": 1,
}

_MALFORMED_BODIES = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe{}",
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1.5}',
    b'{"messages": [{"role": "nobody", "content": "x"}]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": "x"}',
    b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
    b'{"messages": [{"role": "user", "content": "x"}], "top_p": 2}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 0}',
)


def fault_mix(
    rng: Random, *, model: str, max_tokens: int, oversize_words: int
) -> Iterator[RequestPlan]:
    """Endless: ordinary requests among clients that leave, read slowly, send nonsense or too much."""
    kinds, weights = list(_MIX), list(_MIX.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        yield _plan(kind, rng, model=model, max_tokens=max_tokens, oversize_words=oversize_words)


def _plan(
    kind: str, rng: Random, *, model: str, max_tokens: int, oversize_words: int
) -> RequestPlan:
    body = _chat(rng, model, max_tokens)
    match kind:
        case "whole":
            return RequestPlan(body=_without_stream(body), kind=kind, stream=False)
        case "disconnect":
            # A short answer may be over before the client leaves.
            return RequestPlan(
                body=body,
                kind=kind,
                disconnect_after_chunks=rng.randint(0, 8),
                expected=(Outcome.DISCONNECTED, Outcome.OK),
            )
        case "slow reader":
            return RequestPlan(body=body, kind=kind, read_delay_s=rng.uniform(0.05, 0.3))
        case "malformed":
            body = rng.choice(_MALFORMED_BODIES).replace(
                b'{"messages', b'{"model": ' + json.dumps(model).encode() + b', "messages'
            )
            return RequestPlan(body=body, kind=kind, expected=(BAD_REQUEST,))
        case "oversize":
            messages = [{"role": "user", "content": random_text(rng, oversize_words)}]
            body = chat_body(model, messages, max_tokens, {})
            return RequestPlan(body=body, kind=kind, expected=(BAD_REQUEST, TOO_LARGE))
        case "wrong model":
            body = _chat(rng, "no-such-model", max_tokens)
            return RequestPlan(body=body, kind=kind, expected=(NOT_FOUND,))
        case _:
            return RequestPlan(body=body, kind=kind)


def burst(rng: Random, *, model: str, max_tokens: int, size: int) -> Iterator[RequestPlan]:
    """`size` requests meant to arrive at once: each is served or told to come back later."""
    for _ in range(size):
        body = _chat(rng, model, max_tokens)
        yield RequestPlan(body=body, kind="burst", expected=(Outcome.OK, TOO_MANY))


def _chat(rng: Random, model: str, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": random_text(rng, rng.randint(3, 60))}]
    return chat_body(model, messages, rng.randint(1, max_tokens), {})


def _without_stream(body: bytes) -> bytes:
    fields: dict[str, Any] = json.loads(body)
    del fields["stream"], fields["stream_options"]
    return json.dumps(fields).encode()


def disagreements(before: Sample, after: Sample, records: list[RequestRecord]) -> list[str]:
    """What an idle server's counters and its clients' counts say differently; empty when they agree.

    Both samples must be taken while nothing runs, and nobody else may use the server in between. Where a client
    left, the server may have written more than was seen; everywhere else counts must agree to the token.
    """
    found: list[str] = []
    if after.slots_busy or after.queue_length:
        found.append(
            f"{after.slots_busy:g} slots busy, {after.queue_length or 0:g} requests queued"
        )
    answered = sum(record.outcome is not Outcome.CONNECTION for record in records)
    counted = _total(after.requests) - _total(before.requests)
    if counted != answered:
        found.append(f"the server counted {counted:g} requests, the clients {answered}")
    cut_short = any(record.status == 200 and record.outcome is not Outcome.OK for record in records)
    for name, counted, seen in (
        (
            "prompt",
            after.prompt_tokens - before.prompt_tokens,
            sum(record.prompt_tokens or 0 for record in records),
        ),
        (
            "output",
            after.completion_tokens - before.completion_tokens,
            sum(record.completion_tokens or 0 for record in records),
        ),
    ):
        if counted < seen or (counted > seen and not cut_short):
            found.append(f"the server counted {counted:g} {name} tokens, the clients {seen}")
    without = sum(r.status in (429, 503) and r.retry_after is None for r in records)
    if without:
        found.append(f"{without} answers 429 or 503 without Retry-After")
    return found


def _total(counts: tuple[tuple[str, float], ...]) -> float:
    return sum(count for _, count in counts)
