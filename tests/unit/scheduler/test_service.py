"""The scheduler as the gateway sees it, over the scripted engine in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.fake import FakeScript, Fault, FaultKind
from scheduler.config import SchedulerConfig
from scheduler.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineStartFailed,
    EngineUnavailable,
    Overloaded,
    RequestTooLong,
    SlotFailed,
)
from scheduler.messages import Failed, Finished, FinishReason, Tokens
from scheduler.service import Scheduler
from scheduler.stats import EngineState, Outcome
from scheduler.supervisor import EngineLink
from tests.factories import (
    FAST_SUPERVISION,
    FakeClock,
    collect,
    expected_ids,
    launch_in_process,
    make_request,
    make_scheduler,
    wait_until,
)

SLOW = FakeScript(decode_s=0.02, accepted=())
"""About 50 tokens a second and sequence."""


@asynccontextmanager
async def running(scheduler: Scheduler) -> AsyncGenerator[Scheduler]:
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop(0.0)


def outcome(scheduler: Scheduler, wanted: Outcome) -> int:
    return dict(scheduler.stats().totals.outcomes)[wanted]


async def test_a_request_gets_the_engines_tokens_and_a_right_usage() -> None:
    request = make_request(prompt_ids=tuple(range(1, 151)), max_tokens=23, seed=7)
    async with running(make_scheduler()) as scheduler:
        handle = scheduler.submit(request)
        collected = await collect(handle)
    assert collected.token_ids == expected_ids(FakeScript(), request)
    assert isinstance(collected.last, Finished)
    assert collected.last.reason is FinishReason.LENGTH
    assert collected.last.stop_token_id is None
    usage = collected.last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (150, 23, 0)
    assert usage.accepted_tokens <= usage.drafted_tokens
    assert handle.started_s is not None and handle.first_token_s is not None
    assert handle.ended_s is not None
    assert handle.submitted_s <= handle.started_s <= handle.first_token_s <= handle.ended_s


async def test_a_stop_id_in_mid_chain_ends_exactly_there() -> None:
    script = FakeScript(output_ids=(11, 12, 13, 14, 15, 16, 17, 18, 19, 20), accepted=(4,))
    request = make_request(max_tokens=10, stop_token_ids=(14,))
    async with running(make_scheduler(script)) as scheduler:
        collected = await collect(scheduler.submit(request))
    assert collected.token_ids == (11, 12, 13, 14)
    assert isinstance(collected.last, Finished)
    assert collected.last.reason is FinishReason.STOP
    assert collected.last.stop_token_id == 14
    assert collected.last.usage.completion_tokens == 4
    assert collected.last.usage.accepted_tokens == 3


async def test_a_stop_id_on_the_last_allowed_place_is_a_stop() -> None:
    script = FakeScript(output_ids=(11, 12, 13))
    async with running(make_scheduler(script)) as scheduler:
        collected = await collect(
            scheduler.submit(make_request(max_tokens=3, stop_token_ids=(13,)))
        )
    assert isinstance(collected.last, Finished)
    assert collected.last.reason is FinishReason.STOP


async def test_one_token_is_never_overshot() -> None:
    async with running(make_scheduler()) as scheduler:
        collected = await collect(scheduler.submit(make_request(max_tokens=1)))
    assert len(collected.token_ids) == 1


async def test_drafts_and_company_do_not_change_tokens() -> None:
    requests = [
        make_request(
            prompt_ids=tuple(range(1, 40 + 13 * n)), max_tokens=30, seed=n, max_draft=n % 5
        )
        for n in range(20)
    ]
    async with running(make_scheduler()) as scheduler:
        handles = [scheduler.submit(request) for request in requests]
        everything = await asyncio.gather(*map(collect, handles))
        stats = scheduler.stats()
    for request, collected in zip(requests, everything, strict=True):
        assert collected.token_ids == expected_ids(FakeScript(), request)
    assert stats.totals.submitted == 20
    assert dict(stats.totals.outcomes)[Outcome.LENGTH] == 20
    assert stats.totals.completion_tokens == 20 * 30
    assert stats.parking is not None
    num_read = stats.totals.prompt_tokens + stats.parking.resumed_tokens
    assert num_read == sum(len(request.prompt_ids) for request in requests)
    offered, accepted = stats.totals.drafts_offered, stats.totals.drafts_accepted
    assert all(a <= o for a, o in zip(accepted, offered, strict=True))
    assert list(offered) == sorted(offered, reverse=True)
    assert all(view.request_id is None for view in stats.slots)


async def test_logprobs_reach_the_caller() -> None:
    request = make_request(max_tokens=6)
    request = replace(request, sampling=replace(request.sampling, top_logprobs=2))
    async with running(make_scheduler()) as scheduler:
        events = [event async for event in scheduler.submit(request)]
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert all(t.logprobs is not None and len(t.logprobs) == len(t.token_ids) for t in tokens)


async def test_submit_before_start_says_when_to_try_again() -> None:
    scheduler = make_scheduler()
    with pytest.raises(EngineUnavailable) as caught:
        scheduler.submit(make_request())
    assert caught.value.retry_after_s > 0
    with pytest.raises(EngineUnavailable):
        _ = scheduler.info
    assert scheduler.engine_state is EngineState.STARTING
    assert not scheduler.ready
    assert scheduler.stats().slots == ()


async def test_submit_while_loading_is_unavailable() -> None:
    scheduler = make_scheduler(FakeScript(load_s=0.1))
    starting = asyncio.create_task(scheduler.start())
    await asyncio.sleep(0.01)
    with pytest.raises(EngineUnavailable):
        scheduler.submit(make_request())
    await starting
    assert scheduler.ready
    await scheduler.stop(0.0)


async def test_a_failed_load_raises_the_engines_message() -> None:
    scheduler = make_scheduler(FakeScript(load_error="tensor x: found [1], required [2]"))
    with pytest.raises(EngineStartFailed, match=r"tensor x: found \[1\], required \[2\]") as caught:
        await scheduler.start()
    assert caught.value.kind == "ModelLoadError"
    assert scheduler.engine_state is EngineState.FAILED


async def test_a_cancelled_start_leaves_nothing_running() -> None:
    scheduler = make_scheduler(FakeScript(load_s=0.2))
    starting = asyncio.create_task(scheduler.start())
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert len(asyncio.all_tasks()) == 1


async def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    async with running(make_scheduler(FakeScript(max_context=100))) as scheduler:
        with pytest.raises(RequestTooLong) as caught:
            scheduler.submit(make_request(prompt_ids=(1,) * 61, max_tokens=40))
        exact = scheduler.submit(make_request(prompt_ids=(1,) * 60, max_tokens=40))
        collected = await collect(exact)
    assert (caught.value.prompt_tokens, caught.value.max_context) == (61, 100)
    assert len(collected.token_ids) == 40


async def test_a_full_queue_refuses_and_recovers() -> None:
    config = SchedulerConfig(max_queue=3, supervision=FAST_SUPERVISION)
    async with running(make_scheduler(config=config)) as scheduler:
        handles = [scheduler.submit(make_request()) for _ in range(4 + 3)]
        with pytest.raises(Overloaded) as caught:
            scheduler.submit(make_request())
        assert caught.value.retry_after_s >= 1.0
        assert scheduler.stats().totals.rejected == 1
        await asyncio.gather(*map(collect, handles))
        assert isinstance((await collect(scheduler.submit(make_request()))).last, Finished)


async def test_cancel_while_decoding_frees_the_slot_and_silences_the_handle() -> None:
    async with running(make_scheduler(SLOW)) as scheduler:
        handle = scheduler.submit(make_request(max_tokens=500))
        assert isinstance(await anext(handle), Tokens)
        windows = scheduler.stats().totals.windows
        handle.cancel()
        handle.cancel()
        assert [event async for event in handle] == []
        await wait_until(lambda: scheduler.stats().slots[0].request_id is None)
        assert scheduler.stats().totals.windows <= windows + 1
        assert outcome(scheduler, Outcome.CANCELLED) == 1
        assert handle.ended_s is not None


async def test_cancel_while_reading_frees_the_slot() -> None:
    script = FakeScript(prompt_token_s=0.0005)
    async with running(make_scheduler(script)) as scheduler:
        handle = scheduler.submit(make_request(prompt_ids=(1,) * 2000))
        await wait_until(lambda: scheduler.stats().slots[0].read_tokens >= 128)
        windows = scheduler.stats().totals.windows
        handle.cancel()
        await wait_until(lambda: scheduler.stats().slots[0].request_id is None)
        assert scheduler.stats().totals.windows <= windows + 1
        assert scheduler.stats().totals.prompt_tokens < 2000


async def test_cancel_in_the_queue_makes_room() -> None:
    config = SchedulerConfig(max_queue=0, supervision=FAST_SUPERVISION)
    async with running(make_scheduler(SLOW, config=config)) as scheduler:
        handles = [scheduler.submit(make_request(max_tokens=50)) for _ in range(4)]
        handles[3].cancel()
        replacement = scheduler.submit(make_request(max_tokens=1))
        assert isinstance((await collect(replacement)).last, Finished)


async def test_cancel_wakes_a_waiting_reader() -> None:
    async with running(make_scheduler(FakeScript(decode_s=0.5))) as scheduler:
        handle = scheduler.submit(make_request(max_tokens=100))
        await anext(handle)
        reading = asyncio.create_task(collect(handle))
        await asyncio.sleep(0)
        handle.cancel()
        assert (await asyncio.wait_for(reading, 0.1)).last is None


async def test_cancel_after_the_end_changes_nothing() -> None:
    async with running(make_scheduler()) as scheduler:
        handle = scheduler.submit(make_request())
        await wait_until(lambda: handle.ended)
        handle.cancel()
        assert not handle.cancelled
        assert isinstance((await collect(handle)).last, Finished)
        assert [event async for event in handle] == []
        assert outcome(scheduler, Outcome.CANCELLED) == 0


async def test_a_slot_failure_hits_one_request_only() -> None:
    script = FakeScript(faults=(Fault(window=2, kind=FaultKind.SLOT, slot=1),))
    requests = [make_request(seed=n, max_tokens=40) for n in range(6)]
    async with running(make_scheduler(script)) as scheduler:
        handles = [scheduler.submit(request) for request in requests]
        everything = await asyncio.gather(*map(collect, handles))
    failed = [n for n, collected in enumerate(everything) if isinstance(collected.last, Failed)]
    assert failed == [1]
    last = everything[1].last
    assert isinstance(last, Failed) and isinstance(last.error, SlotFailed)
    for n in (0, 2, 3, 4, 5):
        assert everything[n].token_ids == expected_ids(script, requests[n])


async def test_a_refused_window_fails_the_seated_and_spares_the_waiting() -> None:
    script = FakeScript(faults=(Fault(window=3, kind=FaultKind.PLAN),))
    async with running(make_scheduler(script)) as scheduler:
        handles = [scheduler.submit(make_request(max_tokens=40)) for _ in range(6)]
        everything = await asyncio.gather(*map(collect, handles))
        assert scheduler.stats().restarts == 0
    assert [isinstance(collected.last, Failed) for collected in everything] == [True] * 4 + [
        False
    ] * 2


@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.KERNEL, FaultKind.DIE])
async def test_a_dead_engine_fails_those_in_flight_and_comes_back(kind: FaultKind) -> None:
    script = FakeScript(faults=(Fault(window=5, kind=kind),))
    async with running(make_scheduler(script)) as scheduler:
        handles = [scheduler.submit(make_request(max_tokens=100)) for _ in range(6)]
        everything = await asyncio.gather(*map(collect, handles))
        for collected in everything:
            assert isinstance(collected.last, Failed)
            assert isinstance(collected.last.error, EngineDead)
        with pytest.raises(EngineUnavailable) as caught:
            scheduler.submit(make_request())
        assert caught.value.retry_after_s >= 1.0
        await wait_until(lambda: scheduler.ready)
        assert scheduler.stats().restarts == 1
        request = make_request(max_tokens=4)
        assert (await collect(scheduler.submit(request))).token_ids == expected_ids(script, request)


async def test_a_hanging_window_is_cut_by_the_watchdog() -> None:
    script = FakeScript(faults=(Fault(window=1, kind=FaultKind.HANG),))
    supervision = replace(FAST_SUPERVISION, window_timeout_s=0.1)
    config = SchedulerConfig(supervision=supervision)
    async with running(make_scheduler(script, config=config)) as scheduler:
        collected = await collect(scheduler.submit(make_request()))
        assert isinstance(collected.last, Failed)
        assert "longer than 0.1 s" in str(collected.last.error)
        await wait_until(lambda: scheduler.ready)


async def test_repeated_deaths_are_fatal() -> None:
    script = FakeScript(faults=(Fault(window=0, kind=FaultKind.DIE),))
    config = SchedulerConfig(supervision=replace(FAST_SUPERVISION, max_deaths=3))
    async with running(make_scheduler(script, config=config)) as scheduler:
        for _ in range(3):
            await wait_until(lambda: scheduler.ready)
            assert isinstance((await collect(scheduler.submit(make_request()))).last, Failed)
        await asyncio.wait_for(scheduler.fatal.wait(), 1.0)
        assert scheduler.engine_state is EngineState.FAILED
        with pytest.raises(EngineUnavailable):
            scheduler.submit(make_request())
        assert scheduler.stats().restarts == 2


async def test_a_scheduler_that_fails_itself_leaves_nobody_waiting() -> None:
    launches = 0

    async def launch() -> EngineLink:
        nonlocal launches
        launches += 1
        if launches == 2:
            raise RuntimeError("nobody foresaw this")
        return await launch_in_process(SLOW)

    scheduler = Scheduler(SchedulerConfig(supervision=FAST_SUPERVISION), launch)
    async with running(scheduler):
        assert scheduler._engine is not None
        handle = scheduler.submit(make_request(max_tokens=500))
        await anext(handle)
        scheduler._engine.kill()
        last = (await collect(handle)).last
        assert isinstance(last, Failed) and isinstance(last.error, EngineDead)
        await asyncio.wait_for(scheduler.fatal.wait(), 2.0)
        with pytest.raises(EngineUnavailable):
            scheduler.submit(make_request())


async def test_a_contradiction_restarts_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(make_scheduler()) as scheduler:
        roster = scheduler._roster
        assert roster is not None

        def contradict() -> None:
            monkeypatch.undo()
            raise AssertionError("what cannot be")

        monkeypatch.setattr(roster, "seat_waiting", contradict)
        last = (await collect(scheduler.submit(make_request()))).last
        assert isinstance(last, Failed) and "what cannot be" in str(last.error)
        await wait_until(lambda: scheduler.ready)
        assert isinstance((await collect(scheduler.submit(make_request()))).last, Finished)
        assert scheduler.stats().restarts == 1


async def test_deadlines_end_waiting_and_running_requests(clock: FakeClock) -> None:
    async with running(make_scheduler(SLOW, clock=clock)) as scheduler:
        seated = [
            scheduler.submit(make_request(max_tokens=400, deadline_s=5.0)),
            *(scheduler.submit(make_request(max_tokens=400)) for _ in range(3)),
        ]
        waiting = scheduler.submit(make_request(max_tokens=400, deadline_s=4.0))
        await anext(seated[0])
        clock.advance(5.0)
        for handle in (seated[0], waiting):
            last = (await collect(handle)).last
            assert isinstance(last, Failed) and isinstance(last.error, DeadlineExceeded)
        assert outcome(scheduler, Outcome.DEADLINE) == 2
        assert not seated[1].ended


async def test_stop_lets_the_admitted_finish() -> None:
    scheduler = make_scheduler(FakeScript(decode_s=0.002))
    await scheduler.start()
    handles = [scheduler.submit(make_request(max_tokens=20)) for _ in range(6)]
    stopping = asyncio.create_task(scheduler.stop(5.0))
    await asyncio.sleep(0)
    with pytest.raises(Draining) as caught:
        scheduler.submit(make_request())
    assert caught.value.retry_after_s > 0
    await stopping
    everything = await asyncio.gather(*map(collect, handles))
    assert all(isinstance(collected.last, Finished) for collected in everything)
    assert scheduler.engine_state is EngineState.CLOSED


async def test_stop_fails_what_outlasts_the_drain() -> None:
    scheduler = make_scheduler(SLOW)
    await scheduler.start()
    handles = [scheduler.submit(make_request(max_tokens=500)) for _ in range(6)]
    await scheduler.stop(0.05)
    for handle in handles:
        last = (await collect(handle)).last
        assert isinstance(last, Failed) and isinstance(last.error, Draining)
    assert outcome(scheduler, Outcome.SHUTDOWN) == 6
    await scheduler.stop(0.0)


async def test_an_idle_scheduler_runs_no_windows() -> None:
    async with running(make_scheduler()) as scheduler:
        await collect(scheduler.submit(make_request()))
        windows = scheduler.stats().totals.windows
        await asyncio.sleep(0.05)
        assert scheduler.stats().totals.windows == windows


async def test_stats_show_who_sits_where() -> None:
    async with running(make_scheduler(SLOW)) as scheduler:
        handles = [
            scheduler.submit(make_request(request_id=f"r{n}", max_tokens=300)) for n in range(5)
        ]
        await anext(handles[0])
        stats = scheduler.stats()
        assert [view.request_id for view in stats.slots] == ["r0", "r1", "r2", "r3"]
        assert stats.slots[0].prompt_tokens == stats.slots[0].read_tokens == 3
        assert stats.slots[0].output_tokens >= 1
        assert stats.queued == 1
        assert stats.engine_state is EngineState.READY
