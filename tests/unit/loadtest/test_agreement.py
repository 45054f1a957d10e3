"""Counters of server and clients are compared to the token; what a client could not hear has bounds."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.agreement import CANARY, disagreements
from loadtest.client import Outcome, RequestRecord
from loadtest.scrape import Sample
from tests.unit.loadtest.records import record, sample


def counted(outcomes: dict[str, tuple[int, int, int]], **values: Any) -> Sample:
    """outcome -> (requests, prompt tokens, output tokens)."""
    return sample(
        **{
            "requests": tuple((name, float(row[0])) for name, row in outcomes.items()),
            "request_prompt_tokens": tuple((name, row[1]) for name, row in outcomes.items()),
            "request_completion_tokens": tuple((name, row[2]) for name, row in outcomes.items()),
            "prompt_tokens": sum(row[1] for row in outcomes.values()),
            "completion_tokens": sum(row[2] for row in outcomes.values()),
            **values,
        }
    )


def left(outcome: Outcome = Outcome.DISCONNECTED, **values: Any) -> RequestRecord:
    fields: dict[str, Any] = {"max_tokens": 9, "chunk_times_s": (1.0, 2.0)}
    counts = {"prompt_tokens": 10, "completion_tokens": 3}
    return record(outcome, **{**fields, **counts, **values})


def dead(**values: Any) -> RequestRecord:
    return left(Outcome.STREAM_ERROR, **{"error_code": "engine_dead", **values})


def compare(
    outcomes: dict[str, tuple[int, int, int]], *records: RequestRecord, **values: Any
) -> list[str]:
    return disagreements(sample(), counted(outcomes, **values), records)


def test_equal_counts_agree() -> None:
    assert compare({"stop": (2, 20, 10)}, record(), record()) == []
    assert (
        compare(
            {"stop": (1, 10, 5), "length": (1, 10, 5), "queue_full": (1, 0, 0)},
            record(),
            record(finish_reason="length"),
            record(Outcome.HTTP_ERROR, status=429, error_code="queue_full", retry_after="1"),
        )
        == []
    )


def test_counts_from_before_the_run_are_not_the_clients() -> None:
    before = counted({"stop": (7, 70, 35)})
    after = counted({"stop": (8, 80, 40)})
    assert disagreements(before, after, [record()]) == []


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ({"stop": (2, 20, 11)}, "11 output tokens of complete answers, the clients 10"),
        ({"stop": (2, 20, 9)}, "9 output tokens of complete answers, the clients 10"),
        ({"stop": (2, 30, 10)}, "30 prompt tokens of complete answers, the clients 20"),
        ({"stop": (3, 20, 10)}, "3 requests, the clients 2"),
        ({"stop": (1, 20, 10)}, "1 requests, the clients 2"),
        ({"stop": (1, 20, 10), "length": (1, 0, 0)}, "1 requests that ended with length"),
        ({"stop": (2, 20, 10), "cancelled": (0, 0, 4)}, "4 output tokens of answers cut short"),
    ],
)
def test_each_difference_is_named(outcomes: dict[str, tuple[int, int, int]], message: str) -> None:
    assert message in " ".join(compare(outcomes, record(), record()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slots_busy": 1.0}, "1 slots busy"),
        ({"queue_length": 2.0}, "2 requests queued"),
        ({"completion_tokens": 6.0}, "6 output tokens, and 5 by outcome"),
        ({"prompt_tokens": 6.0}, "6 prompt tokens, and 10 by outcome"),
        ({"engine_restarts": 1.0}, "1 engine restarts, 0 engines were killed"),
    ],
)
def test_a_server_must_be_idle_and_agree_with_itself(values: dict[str, Any], message: str) -> None:
    (found,) = compare({"stop": (1, 10, 5)}, record(), **values)
    assert message in found


@pytest.mark.parametrize(
    ("outcomes", "agrees"),
    [
        ({"stop": (1, 10, 5), "cancelled": (1, 10, 3)}, True),
        ({"stop": (1, 10, 5), "cancelled": (1, 10, 9)}, True),
        ({"stop": (1, 10, 5), "cancelled": (1, 10, 2)}, False),  # fewer than the client read
        ({"stop": (1, 10, 5), "cancelled": (1, 10, 10)}, False),  # more than it had asked for
        ({"stop": (1, 10, 5), "cancelled": (1, 9, 3)}, False),
        ({"stop": (2, 20, 8)}, True),  # it left when its answer was complete
        ({"stop": (3, 20, 8)}, False),
        ({"stop": (1, 10, 5)}, False),  # not counted at all
    ],
)
def test_a_client_that_left_bounds_what_it_cost(
    outcomes: dict[str, tuple[int, int, int]], agrees: bool
) -> None:
    assert (compare(outcomes, record(), left()) == []) is agrees


def test_without_usage_each_chunk_read_was_a_token() -> None:
    unknown = left(prompt_tokens=None, completion_tokens=None)
    assert compare({"cancelled": (1, 10, 2)}, unknown) == []
    assert compare({"cancelled": (1, 10, 1)}, unknown) != []


@pytest.mark.parametrize(
    ("outcomes", "agrees"),
    [
        ({"stop": (1, 10, 5), "engine_dead": (1, 10, 4)}, True),
        ({"stop": (2, 20, 9)}, False),  # the client was told that the engine died
        ({"stop": (1, 10, 6), "engine_dead": (1, 10, 3)}, False),
    ],
)
def test_an_answer_lost_with_its_engine_is_counted_as_such(
    outcomes: dict[str, tuple[int, int, int]], agrees: bool
) -> None:
    after = counted(outcomes, engine_restarts=1.0)
    assert (disagreements(sample(), after, [record(), dead()], num_kills=1) == []) is agrees


def test_of_a_lost_connection_the_server_may_know_or_not() -> None:
    lost = record(
        Outcome.CONNECTION, status=None, prompt_tokens=None, completion_tokens=None, max_tokens=4
    )
    assert compare({"stop": (1, 10, 5)}, record(), lost) == []
    assert compare({"stop": (1, 10, 5), "cancelled": (1, 10, 4)}, record(), lost) == []
    assert compare({"stop": (1, 10, 5), "cancelled": (2, 10, 4)}, record(), lost) != []


def test_429_without_retry_after_is_named() -> None:
    refused = record(Outcome.HTTP_ERROR, status=429, error_code="queue_full", prompt_tokens=None)
    assert compare({"queue_full": (1, 0, 0)}, refused) == [
        "1 answers 429 or 503 without Retry-After"
    ]


def test_a_canary_that_changes_its_tune_is_named() -> None:
    same = [record(kind=CANARY, text="a", reasoning="b")] * 2
    assert compare({"stop": (2, 20, 10)}, *same) == []
    other = record(kind=CANARY, text="a", reasoning="c")
    assert compare({"stop": (3, 30, 15)}, *same, other) == [
        "2 different answers to the same greedy question, 3 times"
    ]
