"""The ramp to saturation doubles clients until that is useless, and the knee is where it began to be."""

from __future__ import annotations

import dataclasses

import pytest

from loadtest.config import Slo
from loadtest.driver import Stage
from loadtest.saturation import capacity, is_saturated, knee, next_clients
from loadtest.stats import Summary, summarize

_EMPTY = summarize(
    Stage(name="", concurrency=1, start_s=0.0, deadline_s=10.0, end_s=10.0),
    warmup_s=0.0,
    slo=Slo(),
)


def ramp(*tokens: int) -> list[Summary]:
    return [
        dataclasses.replace(_EMPTY, concurrency=2**index, completion_tokens=count)
        for index, count in enumerate(tokens)
    ]


@pytest.mark.parametrize(
    ("tokens", "following"),
    [
        ((), 1),
        ((100,), 2),
        ((100, 180, 300), 8),
        ((100, 180, 300, 302), 16),  # once without gain may be bad luck
        ((100, 180, 300, 250, 400), 32),
        ((100, 180, 300, 302, 290), None),
        ((0, 0), None),
    ],
)
def test_clients_double_until_twice_nothing_is_gained(
    tokens: tuple[int, ...], following: int | None
) -> None:
    assert next_clients(ramp(*tokens), most=64) == following


def test_the_ramp_is_bounded() -> None:
    assert next_clients(ramp(1, 2, 4), most=8) == 8
    assert next_clients(ramp(1, 2, 4), most=7) is None


def test_the_knee_is_the_smallest_stage_near_the_best() -> None:
    summaries = ramp(100, 180, 300, 320, 310)
    found = knee(summaries)
    assert found is not None
    assert found.concurrency == 4
    assert is_saturated(summaries)


def test_output_that_still_grows_has_not_shown_its_knee() -> None:
    summaries = ramp(100, 200, 400)
    assert knee(summaries) is summaries[-1]
    assert not is_saturated(summaries)


def test_a_server_that_answers_nothing_has_no_knee() -> None:
    assert knee(ramp(0, 0)) is None
    assert not is_saturated(ramp(0, 0))


@pytest.mark.parametrize(
    ("good", "clients"), [((10, 10, 9, 5), 4), ((10, 5, 10, 10), 1), ((8, 10, 10, 10), None)]
)
def test_capacity_ends_at_the_first_stage_that_fails(
    good: tuple[int, ...], clients: int | None
) -> None:
    summaries = [
        dataclasses.replace(_EMPTY, concurrency=2**index, num_requests=10, num_good=count)
        for index, count in enumerate(good)
    ]
    found = capacity(summaries, share=0.9)
    assert (None if found is None else found.concurrency) == clients
