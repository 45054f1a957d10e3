"""The calibration holds reported figures against what the server did, and knows when they are off."""

from __future__ import annotations

import pytest

from loadtest.calibrate import Comparison, compare
from loadtest.driver import Stage
from tests.unit.loadtest.records import record


def stage(delay_s: float) -> tuple[Stage, list[list[float]]]:
    """Twenty answers of five chunks, one after the other, each chunk seen `delay_s` after it was sent."""
    served = [[n, *(n + 0.2 + 0.05 * k for k in range(5))] for n in range(20)]
    records = [
        record(
            intended_start_s=times[0],
            start_s=times[0],
            chunk_times_s=tuple(time_s + delay_s for time_s in times[1:]),
            end_s=times[-1] + delay_s,
        )
        for times in served
    ]
    found = Stage(name="", concurrency=1, start_s=0.0, deadline_s=20.0, records=records, end_s=20.0)
    return found, served


@pytest.mark.parametrize(
    ("delay_s", "off"), [(0.0, set()), (0.003, set()), (0.006, {"ttft, p50", "ttft, p90"})]
)
def test_a_delay_shows_in_the_figures_it_changes(delay_s: float, off: set[str]) -> None:
    found = compare(*stage(delay_s), {"ttft": 0.2, "itl": 0.05})
    assert {figure.name for figure in found if not figure.is_close} == off
    by_name = {figure.name: figure for figure in found}
    assert by_name["ttft, p50"].reported == pytest.approx(0.2 + delay_s)
    assert by_name["ttft, p50"].served == pytest.approx(0.2)
    assert by_name["e2e, p90"].served == pytest.approx(0.4)
    assert by_name["tokens/s"].reported == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("served", "reported", "is_time", "is_close"),
    [
        (0.010, 0.0109, True, True),  # 9 %, but less than a millisecond
        (0.010, 0.0111, True, False),
        (1.0, 1.019, True, True),
        (1.0, 0.979, True, False),
        (100.0, 102.5, False, False),  # a rate has no millisecond
    ],
)
def test_two_percent_or_a_millisecond(
    served: float, reported: float, is_time: bool, is_close: bool
) -> None:
    figure = Comparison(name="", planned=None, served=served, reported=reported, is_time=is_time)
    assert figure.is_close is is_close


def test_a_run_without_a_whole_request_says_so() -> None:
    found, _ = stage(0.0)
    with pytest.raises(ValueError, match="measure for longer"):
        compare(found, [[0.0]], {"ttft": 0.2, "itl": 0.05})
