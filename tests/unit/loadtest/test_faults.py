"""Fault profiles say what each client must get."""

from __future__ import annotations

import itertools
import json
from random import Random

from loadtest.client import RequestPlan
from loadtest.faults import burst, fault_mix


def mix(count: int, seed: int = 0) -> list[RequestPlan]:
    plans = fault_mix(Random(seed), model="m", max_tokens=16, oversize_words=1000)
    return list(itertools.islice(plans, count))


def test_the_mix_has_all_kinds_and_follows_the_seed() -> None:
    assert {plan.kind for plan in mix(300)} == {
        "chat",
        "whole",
        "disconnect",
        "slow reader",
        "malformed",
        "oversize",
        "wrong model",
    }
    assert mix(50) == mix(50) != mix(50, seed=1)


def test_nonsense_expects_400_and_ordinary_requests_expect_success() -> None:
    plans = mix(300)
    assert {p.expected for p in plans if p.kind == "malformed"} == {("http_error 400",)}
    assert {p.expected for p in plans if p.kind in ("chat", "slow reader")} == {("ok",)}
    for plan in plans:
        if plan.kind == "whole":
            assert "stream" not in json.loads(plan.body)


def test_a_burst_may_be_served_or_put_off() -> None:
    plans = list(burst(Random(0), model="m", max_tokens=4, size=9))
    assert len(plans) == 9
    assert {plan.expected for plan in plans} == {("ok", "http_error 429")}


def test_tokens_are_bounded_by_what_was_asked_for() -> None:
    for plan in [*mix(300), *burst(Random(0), model="m", max_tokens=4, size=9)]:
        if plan.kind not in ("malformed", "oversize", "wrong model"):
            assert 1 <= plan.max_tokens == json.loads(plan.body)["max_tokens"]
