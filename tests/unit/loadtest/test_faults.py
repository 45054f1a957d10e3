"""Fault profiles say what each client must get; counters of server and clients are compared to the token."""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any

import pytest

from loadtest.client import Outcome, RequestPlan, RequestRecord
from loadtest.faults import burst, disagreements, fault_mix
from loadtest.scrape import Sample, acceptance, acceptance_rate, parse

EXPOSITION = """\
# HELP stratagate_slots_busy Seats taken.
# TYPE stratagate_slots_busy gauge
stratagate_slots_busy 2.0
# TYPE stratagate_slots gauge
stratagate_slots 4.0
# TYPE stratagate_drafts_offered counter
stratagate_drafts_offered_total{depth="1"} 10.0
stratagate_drafts_offered_total{depth="2"} 5.0
# TYPE stratagate_drafts_accepted counter
stratagate_drafts_accepted_total{depth="1"} 8.0
stratagate_drafts_accepted_total{depth="2"} 1.0
# TYPE stratagate_requests counter
stratagate_requests_total{endpoint="chat",outcome="stop"} 3.0
stratagate_requests_total{endpoint="completions",outcome="stop"} 1.0
# TYPE stratagate_completion_tokens counter
stratagate_completion_tokens_total 40.0
"""


def sample(**values: Any) -> Sample:
    fields: dict[str, Any] = {
        "time_s": 0.0,
        "slots": 4.0,
        "slots_busy": 0.0,
        "queue_length": 0.0,
        "prompt_tokens": 0.0,
        "completion_tokens": 0.0,
        "drafts_offered": (),
        "drafts_accepted": (),
        "requests": (("stop", 0.0),),
    }
    return Sample(**{**fields, **values})


def record(outcome: Outcome = Outcome.OK, **values: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "kind": "chat",
        "intended_start_s": 0.0,
        "start_s": 0.0,
        "end_s": 1.0,
        "chunk_times_s": (),
        "outcome": outcome,
        "expected": True,
        "status": 200,
        "prompt_tokens": 10,
        "completion_tokens": 5,
    }
    return RequestRecord(**{**fields, **values})


def mix(count: int, seed: int = 0) -> list[RequestPlan]:
    plans = fault_mix(Random(seed), model="m", max_tokens=16, oversize_words=1000)
    return list(itertools.islice(plans, count))


def test_metrics_are_read_by_name_and_label() -> None:
    found = parse(EXPOSITION, time_s=3.0)
    assert (found.slots, found.slots_busy, found.queue_length) == (4.0, 2.0, None)
    assert found.requests == (("stop", 4.0),)
    assert found.completion_tokens == 40.0
    assert acceptance(sample(), found) == (("1", 10.0, 8.0), ("2", 5.0, 1.0))
    assert acceptance_rate(sample(), found) == pytest.approx(9 / 15)
    assert acceptance_rate(found, found) is None


def test_another_servers_metrics_are_a_sample_without_ours() -> None:
    assert parse("# TYPE up gauge\nup 1\n", time_s=0.0).slots_busy is None


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


def test_equal_counts_agree() -> None:
    after = sample(prompt_tokens=20.0, completion_tokens=10.0, requests=(("stop", 2.0),))
    assert disagreements(sample(), after, [record(), record()]) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"completion_tokens": 11.0}, "11 output tokens, the clients 10"),
        ({"completion_tokens": 9.0}, "9 output tokens"),
        ({"prompt_tokens": 30.0}, "30 prompt tokens"),
        ({"requests": (("stop", 3.0),)}, "3 requests, the clients 2"),
        ({"slots_busy": 1.0}, "1 slots busy"),
    ],
)
def test_each_difference_is_named(changed: dict[str, Any], message: str) -> None:
    equal = {"prompt_tokens": 20.0, "completion_tokens": 10.0, "requests": (("stop", 2.0),)}
    after = sample(**{**equal, **changed})
    (found,) = disagreements(sample(), after, [record(), record()])
    assert message in found


def test_a_client_that_left_may_have_missed_tokens_but_never_saw_more() -> None:
    left = record(Outcome.DISCONNECTED, prompt_tokens=None, completion_tokens=None)
    more = sample(prompt_tokens=20.0, completion_tokens=9.0, requests=(("stop", 2.0),))
    assert disagreements(sample(), more, [record(), left]) == []
    fewer = sample(prompt_tokens=20.0, completion_tokens=4.0, requests=(("stop", 2.0),))
    assert len(disagreements(sample(), fewer, [record(), left])) == 1


def test_a_request_without_answer_is_not_expected_in_the_servers_count() -> None:
    lost = record(Outcome.CONNECTION, status=None, prompt_tokens=None, completion_tokens=None)
    after = sample(prompt_tokens=10.0, completion_tokens=5.0, requests=(("stop", 1.0),))
    assert disagreements(sample(), after, [record(), lost]) == []


def test_429_without_retry_after_is_named() -> None:
    refused = record(Outcome.HTTP_ERROR, status=429, prompt_tokens=None, completion_tokens=None)
    after = sample(requests=(("queue_full", 1.0),))
    assert disagreements(sample(), after, [refused]) == ["1 answers 429 or 503 without Retry-After"]
