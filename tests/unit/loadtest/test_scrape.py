"""What is read from a server's metrics."""

from __future__ import annotations

import pytest

from loadtest.scrape import acceptance, acceptance_rate, parse
from tests.unit.loadtest.records import sample

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
# TYPE stratagate_request_tokens counter
stratagate_request_tokens_total{kind="prompt",outcome="stop"} 70.0
stratagate_request_tokens_total{kind="completion",outcome="stop"} 30.0
stratagate_request_tokens_total{kind="completion",outcome="cancelled"} 10.0
# TYPE stratagate_engine_restarts counter
stratagate_engine_restarts_total 2.0
# TYPE stratagate_engine_up gauge
stratagate_engine_up 0.0
# TYPE stratagate_parked_bytes gauge
stratagate_parked_bytes 500.0
"""


def test_metrics_are_read_by_name_and_label() -> None:
    found = parse(EXPOSITION, time_s=3.0)
    assert (found.slots, found.slots_busy, found.queue_length) == (4.0, 2.0, None)
    assert found.requests == (("stop", 4.0),)
    assert found.completion_tokens == 40.0
    assert found.request_prompt_tokens == (("stop", 70.0),)
    assert found.request_completion_tokens == (("cancelled", 10.0), ("stop", 30.0))
    assert (found.engine_restarts, found.engine_up) == (2.0, False)
    assert found.parked_bytes == 500.0
    assert acceptance(sample(), found) == (("1", 10.0, 8.0), ("2", 5.0, 1.0))
    assert acceptance_rate(sample(), found) == pytest.approx(9 / 15)
    assert acceptance_rate(found, found) is None


def test_another_servers_metrics_are_a_sample_without_ours() -> None:
    assert parse("# TYPE up gauge\nup 1\n", time_s=0.0).slots_busy is None


@pytest.mark.parametrize(
    ("busy", "queued", "is_up", "is_idle"),
    [
        (0.0, 0.0, True, True),
        (1.0, 0.0, True, False),
        (0.0, 1.0, True, False),
        (0.0, 0.0, False, False),
    ],
)
def test_an_idle_server_has_an_engine_and_no_work(
    busy: float, queued: float, is_up: bool, is_idle: bool
) -> None:
    found = sample(slots_busy=busy, queue_length=queued, engine_up=is_up)
    assert found.is_idle is is_idle
