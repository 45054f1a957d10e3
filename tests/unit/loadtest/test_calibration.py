"""Against a server whose times are known exactly, every reported figure is exact."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from random import Random

import httpx
import pytest

from loadtest.arrivals import start_times
from loadtest.client import RequestPlan, RequestRecord, send
from loadtest.config import Arrivals, Limits, Shape, Slo
from loadtest.driver import Driver, Stage
from loadtest.stats import Distribution, Summary, summarize, tokens_over_time
from loadtest.workload import Conversation
from tests.unit.loadtest.virtual import (
    TARGET,
    Script,
    ScriptedServer,
    Unreachable,
    Whole,
    client,
    limits,
    run,
    steady,
)


def conversations(turns: int = 1) -> Iterator[Conversation | RequestPlan]:
    return itertools.repeat(Conversation(turns=("hello",) * turns, max_tokens=8))


def closed(server: ScriptedServer, concurrency: int, bounds: Limits, turns: int = 1) -> Stage:
    async def main() -> Stage:
        async with client(server) as http:
            driver = Driver(http=http, target=TARGET, limits=bounds, source=conversations(turns))
            return await driver.closed_loop(concurrency)

    return run(main())


def opened(server: ScriptedServer, starts_s: list[float], bounds: Limits) -> Stage:
    async def main() -> Stage:
        async with client(server) as http:
            driver = Driver(http=http, target=TARGET, limits=bounds, source=conversations())
            return await driver.open_loop("open", starts_s)

    return run(main())


def metric(summary: Summary, name: str) -> Distribution:
    found = summary.get(name)
    assert found is not None
    return found


def test_one_client_sees_the_times_of_the_server() -> None:
    server = ScriptedServer(lambda _: steady(ttft_s=0.2, itl_s=0.01, num_chunks=11))
    stage = closed(server, 1, limits(max_requests=5))
    summary = summarize(stage, warmup_s=0.0, slo=Slo())
    for name, expected in {"ttft": 0.2, "itl": 0.01, "tpot": 0.01, "e2e": 0.3, "late": 0.0}.items():
        found = metric(summary, name)
        assert (found.minimum, found.mean, found.maximum) == pytest.approx((expected,) * 3)
        assert found.percentiles == pytest.approx((expected,) * 6)
    assert summary.window_s == pytest.approx(1.5)
    assert summary.completion_tokens == 55
    assert summary.tokens_per_s == pytest.approx(55 / 1.5)
    assert summary.prompt_tokens_per_s == pytest.approx(35 / 1.5)
    assert summary.requests_per_s == pytest.approx(5 / 1.5)
    assert summary.outcomes == (("ok", 5),)


def test_several_tokens_a_chunk_lengthen_the_gap_and_not_the_time_per_token() -> None:
    server = ScriptedServer(
        lambda _: steady(ttft_s=0.1, itl_s=0.03, num_chunks=11, tokens_per_chunk=3)
    )
    summary = summarize(closed(server, 1, limits(max_requests=2)), warmup_s=0.0, slo=Slo())
    assert metric(summary, "itl").mean == pytest.approx(0.03)
    assert metric(summary, "tpot").mean == pytest.approx(0.3 / 32)
    assert summary.completion_tokens == 66
    assert summary.num_chunks == 22


def test_clients_run_side_by_side() -> None:
    server = ScriptedServer(lambda _: steady(ttft_s=0.2, itl_s=0.1, num_chunks=9))
    summary = summarize(closed(server, 4, limits(max_requests=20)), warmup_s=0.0, slo=Slo())
    assert summary.tokens_per_s == pytest.approx(4 * 9 / 1.0)
    assert summary.num_requests == 20


def test_warm_up_is_sent_but_not_counted() -> None:
    answers = itertools.chain([5.0], itertools.repeat(0.5))
    server = ScriptedServer(lambda _: steady(ttft_s=next(answers), itl_s=0.1, num_chunks=6))
    bounds = limits(duration_s=15.25, warmup_s=2.0)
    summary = summarize(closed(server, 1, bounds), warmup_s=2.0, slo=Slo())
    # The first request began inside the warm-up: its latency is left out, its tokens that arrived later are not.
    assert summary.num_requests == 10
    assert metric(summary, "ttft").maximum == pytest.approx(0.5)
    assert summary.completion_tokens == 6 + 9 * 6 + 3
    assert summary.window_s == pytest.approx(13.25)


def test_what_runs_out_after_the_deadline_lowers_no_rate() -> None:
    server = ScriptedServer(lambda _: steady(ttft_s=1.0, itl_s=1.0, num_chunks=8))
    stage = closed(server, 1, limits(duration_s=10.5))
    summary = summarize(stage, warmup_s=0.0, slo=Slo())
    assert stage.end_s == pytest.approx(16.0)
    assert summary.window_s == pytest.approx(10.5)
    assert summary.completion_tokens == 10
    assert summary.requests_per_s == pytest.approx(1 / 10.5)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = ScriptedServer(lambda _: steady(ttft_s=10.0, itl_s=0.0, num_chunks=1))
    stage = opened(server, [0.0, 1.0, 2.0, 3.0], limits())
    starts = sorted(record.start_s - stage.start_s for record in stage.records)
    assert starts == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert stage.end_s - stage.start_s == pytest.approx(13.0)


def test_latency_counts_from_the_intended_start() -> None:
    """A second turn is due when the first answer and the pause are over; only then does its clock start."""
    server = ScriptedServer(lambda _: steady(ttft_s=0.4, itl_s=0.1, num_chunks=2))
    summary = summarize(closed(server, 1, limits(max_requests=6), turns=3), warmup_s=0, slo=Slo())
    assert metric(summary, "ttft").maximum == pytest.approx(0.4)
    assert [len(request["messages"]) for request in server.requests] == [1, 3, 5, 1, 3, 5]
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "x x "}


def test_request_cap_and_deadline_bound_both_loops() -> None:
    server = ScriptedServer(lambda _: steady(ttft_s=0.1, itl_s=0.1, num_chunks=1))
    assert len(closed(server, 3, limits(max_requests=7)).records) == 7
    assert len(closed(server, 1, limits(duration_s=0.95)).records) == 10
    assert len(opened(server, [0.0] * 50, limits(max_requests=7)).records) == 7
    assert len(opened(server, [float(i) for i in range(50)], limits(duration_s=4.5)).records) == 5


@pytest.mark.parametrize(
    ("retry_after", "starts_s"), [("3", [0, 3, 6, 9]), ("tomorrow", [0, 1, 2, 3]), (None, [0] * 4)]
)
def test_a_client_comes_back_when_it_is_told_to(
    retry_after: str | None, starts_s: list[float]
) -> None:
    server = ScriptedServer(lambda _: Script(pieces=(), status=503, retry_after=retry_after))
    stage = closed(server, 1, limits(max_requests=4))
    assert [record.start_s for record in stage.records] == starts_s


def test_a_server_that_is_not_there_is_not_hammered() -> None:
    async def main() -> Stage:
        async with client(Unreachable()) as http:
            driver = Driver(
                http=http, target=TARGET, limits=limits(duration_s=5.5), source=conversations()
            )
            return await driver.closed_loop(2)

    assert len(run(main()).records) == 12


def test_a_stall_is_seen_by_every_request_that_was_due_in_it() -> None:
    """Coordinated omission: a server stuck for 10 s delays all ten that were due, not only the one it had."""
    stuck = iter([10.0])
    server = ScriptedServer(lambda _: steady(ttft_s=next(stuck, 0.1), itl_s=0.1, num_chunks=1))
    one_at_a_time = asyncio.Semaphore(1)

    class OneByOne(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            async with one_at_a_time:
                response = await server.handle_async_request(request)
                content = await response.aread()
            headers = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=headers, stream=Whole(content))

    async def main() -> Stage:
        async with client(OneByOne()) as http:
            driver = Driver(http=http, target=TARGET, limits=limits(), source=conversations())
            return await driver.open_loop("open", [float(n) for n in range(10)])

    summary = summarize(run(main()), warmup_s=0.0, slo=Slo())
    assert metric(summary, "ttft").maximum == pytest.approx(10.0)
    assert metric(summary, "ttft").at(50) == pytest.approx(5.95)
    assert metric(summary, "late").maximum == pytest.approx(0.0)


def test_a_late_driver_does_not_shorten_latencies() -> None:
    """What keeps the driver itself from sending in time counts, and is shown."""
    server = ScriptedServer(lambda _: steady(ttft_s=0.2, itl_s=0.1, num_chunks=1))

    async def main() -> RequestRecord:
        async with client(server) as http:
            await asyncio.sleep(0.5)
            return await send(http, RequestPlan(body=b"{}"), intended_start_s=0.0, timeout_s=9.0)

    record = run(main())
    assert (record.ttft_s, record.late_s) == (pytest.approx(0.7), pytest.approx(0.5))


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    first = iter([0.1, 0.3, 0.1, 0.1])
    gaps = iter([0.01, 0.01, 0.05, 0.01])
    server = ScriptedServer(lambda _: steady(ttft_s=next(first), itl_s=next(gaps), num_chunks=3))
    slo = Slo(limits=(("ttft", 0.2), ("itl", 0.02)))
    summary = summarize(closed(server, 1, limits(max_requests=4)), warmup_s=0.0, slo=slo)
    assert (summary.num_good, summary.good_share) == (2, 0.5)
    assert summary.goodput_per_s == pytest.approx(2 / summary.window_s)


def test_tokens_over_time_sum_to_the_tokens() -> None:
    server = ScriptedServer(
        lambda _: steady(ttft_s=0.5, itl_s=0.25, num_chunks=9, tokens_per_chunk=2)
    )
    stage = closed(server, 2, limits(max_requests=4))
    points = tokens_over_time(stage, 1.0)
    assert sum(rate for _, rate in points) == pytest.approx(4 * 18)
    assert points[0] == (0.5, pytest.approx(2 * 2 * 2))


@pytest.mark.parametrize("shape", [Shape.CONSTANT, Shape.POISSON, Shape.GAMMA])
def test_arrival_rates_are_the_ones_asked_for(shape: Shape) -> None:
    arrivals = Arrivals(shape=shape, rate=8.0, burstiness=0.3)
    times = start_times(arrivals, duration_s=1.0, trace_s=(), rng=Random(1))
    found = list(itertools.islice(times, 20_000))
    assert found == sorted(found)
    assert len(found) / found[-1] == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_gamma_shape(burstiness: float) -> None:
    arrivals = Arrivals(shape=Shape.GAMMA, rate=2.0, burstiness=burstiness)
    times = start_times(arrivals, duration_s=1.0, trace_s=(), rng=Random(2))
    found = list(itertools.islice(times, 40_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


@pytest.mark.parametrize(("rate", "rate_end"), [(1.0, 9.0), (9.0, 1.0), (5.0, 5.0)])
def test_a_ramp_grows_linearly(rate: float, rate_end: float) -> None:
    arrivals = Arrivals(shape=Shape.RAMP, rate=rate, rate_end=rate_end)
    found = list(start_times(arrivals, duration_s=2000.0, trace_s=(), rng=Random(3)))
    assert len(found) == pytest.approx(10_000, rel=0.05)
    first_half = sum(time < 1000.0 for time in found)
    assert first_half == pytest.approx(1000 * (rate * 3 + rate_end) / 4, rel=0.05)


def test_a_trace_is_replayed_in_order() -> None:
    times = start_times(
        Arrivals(shape=Shape.TRACE), duration_s=1, trace_s=[3.0, 1.0], rng=Random(0)
    )
    assert list(times) == [1.0, 3.0]
