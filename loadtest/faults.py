"""Clients that misbehave, and what a server must answer them: one expected outcome (or few) for each request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loadtest.client import Outcome, RequestPlan
from loadtest.driver import chat_body
from loadtest.workload import random_text

if TYPE_CHECKING:
    from random import Random

BAD_REQUEST = "http_error 400"
NOT_FOUND = "http_error 404"
TOO_LARGE = "http_error 413"
TOO_MANY = "http_error 429"

ENGINE_LOST = ("stream_error engine_dead", "http_error 503")
"""What a request may end with when the engine is killed, beside what it should."""

# Chunks say how many tokens there were so far: so the tokens of an answer that is cut short are known too.
COUNTED: dict[str, object] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}

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
    num_tokens = rng.randint(1, max_tokens)
    body = _chat(rng, model, num_tokens)
    plan = RequestPlan(body=body, kind=kind, max_tokens=num_tokens)
    match kind:
        case "whole":
            return replace(plan, body=_without_stream(body), stream=False)
        case "disconnect":
            # A short answer may be over before the client leaves.
            return replace(
                plan,
                disconnect_after_chunks=rng.randint(0, 8),
                expected=(Outcome.DISCONNECTED, Outcome.OK),
            )
        case "slow reader":
            return replace(plan, read_delay_s=rng.uniform(0.05, 0.3))
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
            return plan


def burst(rng: Random, *, model: str, max_tokens: int, size: int) -> Iterator[RequestPlan]:
    """`size` requests meant to arrive at once: each is served or told to come back later."""
    for _ in range(size):
        num_tokens = rng.randint(1, max_tokens)
        yield RequestPlan(
            body=_chat(rng, model, num_tokens),
            kind="burst",
            max_tokens=num_tokens,
            expected=(Outcome.OK, TOO_MANY),
        )


def _chat(rng: Random, model: str, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": random_text(rng, rng.randint(3, 60))}]
    return chat_body(model, messages, max_tokens, COUNTED)


def _without_stream(body: bytes) -> bytes:
    fields: dict[str, Any] = json.loads(body)
    del fields["stream"], fields["stream_options"]
    return json.dumps(fields).encode()
