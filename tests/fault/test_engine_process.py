"""The scheduler over a real engine process: killed, hung, refused, drained, orphaned."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.fake import FakeScript, Fault, FaultKind
from scheduler.config import SchedulerConfig, SupervisionConfig
from scheduler.engine_client import ProcessLink
from scheduler.errors import Draining, EngineDead, EngineStartFailed, EngineUnavailable, SlotFailed
from scheduler.factory import build_scheduler
from scheduler.handle import RequestHandle
from scheduler.messages import Failed, Finished, Tokens
from scheduler.service import Scheduler
from scheduler.stats import EngineState, Outcome
from tests.factories import (
    FAST_SUPERVISION,
    collect,
    expected_ids,
    make_request,
    wait_until,
)

ROOT = Path(__file__).parents[2]
SLOW = FakeScript(decode_s=0.02, accepted=())


def config(
    script: FakeScript | None, supervision: SupervisionConfig = FAST_SUPERVISION
) -> SchedulerConfig:
    return SchedulerConfig(scripted=script, supervision=supervision)


@asynccontextmanager
async def running(
    script: FakeScript, supervision: SupervisionConfig = FAST_SUPERVISION
) -> AsyncGenerator[Scheduler]:
    scheduler = build_scheduler(config(script, supervision))
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop(0.0)


def engine_pid(scheduler: Scheduler) -> int:
    supervisor = scheduler._engine
    assert supervisor is not None
    link = supervisor._link
    assert isinstance(link, ProcessLink)
    return link.pid


def is_alive(pid: int) -> bool:
    """Whether a process that may not be our child still runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def error_of(handle: RequestHandle) -> Exception:
    last = (await collect(handle)).last
    assert isinstance(last, Failed)
    return last.error


async def test_twenty_requests_share_four_slots() -> None:
    requests = [
        make_request(prompt_ids=tuple(range(1, 10 + 17 * n)), max_tokens=10 + n, seed=n)
        for n in range(20)
    ]
    async with running(FakeScript()) as scheduler:
        everything = await asyncio.gather(*(collect(scheduler.submit(r)) for r in requests))
        totals = scheduler.stats().totals
    for request, collected in zip(requests, everything, strict=True):
        assert isinstance(collected.last, Finished)
        assert collected.token_ids == expected_ids(FakeScript(), request)
        assert collected.last.usage.completion_tokens == request.max_tokens
        assert collected.last.usage.prompt_tokens == len(request.prompt_ids)
    assert totals.completion_tokens == sum(request.max_tokens for request in requests)


async def test_a_killed_engine_fails_those_in_flight_at_once_and_comes_back() -> None:
    async with running(SLOW) as scheduler:
        handles = [scheduler.submit(make_request(max_tokens=1000)) for _ in range(6)]
        assert isinstance(await anext(handles[0]), Tokens)
        killed_at = time.monotonic()
        os.kill(engine_pid(scheduler), signal.SIGKILL)
        async with asyncio.timeout(1.0):
            errors = await asyncio.gather(*map(error_of, handles))
        assert time.monotonic() - killed_at < 1.0
        assert all(isinstance(error, EngineDead) for error in errors)
        assert "SIGKILL" in str(errors[0])
        assert not scheduler.ready
        with pytest.raises(EngineUnavailable) as caught:
            scheduler.submit(make_request())
        assert caught.value.retry_after_s >= 1.0
        await wait_until(lambda: scheduler.ready)
        request = make_request(max_tokens=5)
        assert (await collect(scheduler.submit(request))).token_ids == expected_ids(SLOW, request)
        assert scheduler.stats().restarts == 1
        assert dict(scheduler.stats().totals.outcomes)[Outcome.ENGINE_DEAD] == 6


async def test_an_idle_engine_that_is_killed_comes_back() -> None:
    async with running(FakeScript()) as scheduler:
        os.kill(engine_pid(scheduler), signal.SIGKILL)
        await wait_until(lambda: not scheduler.ready)
        await wait_until(lambda: scheduler.ready)
        assert isinstance((await collect(scheduler.submit(make_request()))).last, Finished)


async def test_a_hanging_engine_is_killed_by_the_watchdog() -> None:
    script = FakeScript(faults=(Fault(window=2, kind=FaultKind.HANG),))
    async with running(script, replace(FAST_SUPERVISION, window_timeout_s=0.2)) as scheduler:
        hung_pid = engine_pid(scheduler)
        error = await error_of(scheduler.submit(make_request(max_tokens=100)))
        assert isinstance(error, EngineDead)
        assert "longer than 0.2 s" in str(error)
        await wait_until(lambda: scheduler.ready)
        assert not is_alive(hung_pid)
        assert engine_pid(scheduler) != hung_pid


async def test_a_stopped_process_is_killed_by_the_watchdog() -> None:
    async with running(SLOW, replace(FAST_SUPERVISION, window_timeout_s=0.3)) as scheduler:
        handle = scheduler.submit(make_request(max_tokens=1000))
        await anext(handle)
        os.kill(engine_pid(scheduler), signal.SIGSTOP)
        assert isinstance(await error_of(handle), EngineDead)
        await wait_until(lambda: scheduler.ready)


async def test_a_device_failure_gives_its_message_and_a_new_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = FakeScript(faults=(Fault(window=3, kind=FaultKind.KERNEL),))
    async with running(script) as scheduler:
        first_pid = engine_pid(scheduler)
        error = await error_of(scheduler.submit(make_request(max_tokens=100)))
        assert "KernelFailure: scripted kernel in window 3" in str(error)
        await wait_until(lambda: scheduler.ready)
        assert engine_pid(scheduler) != first_pid
    assert "Traceback" in caplog.text  # the engine's own, across the process border


async def test_a_refused_plan_keeps_the_process() -> None:
    script = FakeScript(faults=(Fault(window=3, kind=FaultKind.PLAN),))
    async with running(script) as scheduler:
        pid = engine_pid(scheduler)
        error = await error_of(scheduler.submit(make_request(max_tokens=100)))
        assert isinstance(error, SlotFailed)
        assert isinstance((await collect(scheduler.submit(make_request()))).last, Finished)
        assert engine_pid(scheduler) == pid
        assert scheduler.stats().restarts == 0


async def test_a_failed_load_tells_why_and_leaves_no_process() -> None:
    scheduler = build_scheduler(
        config(FakeScript(load_error="layers.3.w: found (2,), required (3,)"))
    )
    with pytest.raises(EngineStartFailed) as caught:
        await scheduler.start()
    assert caught.value.kind == "ModelLoadError"
    assert "layers.3.w: found (2,), required (3,)" in str(caught.value)
    assert scheduler.engine_state is EngineState.FAILED
    with pytest.raises(Draining):
        scheduler.submit(make_request())


async def test_an_unknown_model_is_a_failed_load() -> None:
    engine = EngineConfig(model="/nonexistent/model", device="cpu")
    scheduler = build_scheduler(SchedulerConfig(engine=engine, supervision=FAST_SUPERVISION))
    with pytest.raises(EngineStartFailed) as caught:
        await scheduler.start()
    assert caught.value.kind != ""


async def test_a_process_that_dies_while_loading_is_a_failed_load() -> None:
    scheduler = build_scheduler(config(FakeScript(load_dies=True)))
    with pytest.raises(EngineStartFailed, match="status 3 while loading"):
        await scheduler.start()


async def test_a_load_that_takes_too_long_is_given_up() -> None:
    supervision = replace(FAST_SUPERVISION, load_timeout_s=0.3)
    scheduler = build_scheduler(config(FakeScript(load_s=60.0), supervision))
    with pytest.raises(EngineStartFailed, match="longer than 0.3 s"):
        await scheduler.start()


async def test_a_cancelled_start_leaves_no_process() -> None:
    scheduler = build_scheduler(config(FakeScript(load_s=60.0)))
    starting = asyncio.create_task(scheduler.start())
    await asyncio.sleep(0.3)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert len(asyncio.all_tasks()) == 1
    assert scheduler.engine_state is EngineState.CLOSED


async def test_repeated_deaths_are_fatal() -> None:
    script = FakeScript(faults=(Fault(window=0, kind=FaultKind.DIE),))
    async with running(script, replace(FAST_SUPERVISION, max_deaths=2)) as scheduler:
        for _ in range(2):
            await wait_until(lambda: scheduler.ready)
            error = await error_of(scheduler.submit(make_request()))
            assert "status 3" in str(error)
        await asyncio.wait_for(scheduler.fatal.wait(), 2.0)
        assert scheduler.engine_state is EngineState.FAILED


async def test_a_drain_lets_streams_finish_and_ends_the_process() -> None:
    scheduler = build_scheduler(config(FakeScript(decode_s=0.002)))
    await scheduler.start()
    pid = engine_pid(scheduler)
    handles = [scheduler.submit(make_request(max_tokens=20)) for _ in range(6)]
    await scheduler.stop(10.0)
    everything = await asyncio.gather(*map(collect, handles))
    assert all(isinstance(collected.last, Finished) for collected in everything)
    assert not is_alive(pid)


async def test_a_drain_that_runs_out_fails_the_rest() -> None:
    scheduler = build_scheduler(config(SLOW))
    await scheduler.start()
    pid = engine_pid(scheduler)
    handle = scheduler.submit(make_request(max_tokens=2000))
    await anext(handle)
    await scheduler.stop(0.05)
    assert isinstance(await error_of(handle), Draining)
    assert not is_alive(pid)


async def test_a_signal_to_the_whole_group_does_not_cut_a_stream() -> None:
    async with running(FakeScript(decode_s=0.005)) as scheduler:
        handle = scheduler.submit(make_request(max_tokens=40))
        await anext(handle)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine_pid(scheduler), number)
        assert isinstance((await collect(handle)).last, Finished)


async def test_cancel_frees_the_slot_within_a_window() -> None:
    async with running(replace(SLOW, prompt_token_s=0.0005)) as scheduler:
        reading = scheduler.submit(make_request(prompt_ids=(1,) * 3000))
        await wait_until(lambda: scheduler.stats().slots[0].read_tokens > 0)
        decoding = scheduler.submit(make_request(max_tokens=1000))
        await anext(decoding)
        windows = scheduler.stats().totals.windows
        reading.cancel()
        decoding.cancel()
        await wait_until(lambda: all(v.request_id is None for v in scheduler.stats().slots))
        assert scheduler.stats().totals.windows <= windows + 1
        assert [event async for event in decoding] == []


ORPHAN_MAKER = """
import asyncio
from engine.fake import FakeScript, Fault, FaultKind
from scheduler.config import SchedulerConfig
from scheduler.factory import build_scheduler
from tests.factories import make_request

async def main():
    script = FakeScript(faults=(Fault(window=0, kind=FaultKind.HANG),))
    scheduler = build_scheduler(SchedulerConfig(scripted=script))
    await scheduler.start()
    if {in_window}:
        scheduler.submit(make_request())
        await asyncio.sleep(0.1)
    print(scheduler._engine._link.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


# Elsewhere no signal tells a child of its parent's death: there the engine ends when it next reads its closed pipe.
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and the parent's death signal")
@pytest.mark.parametrize("in_window", [False, True], ids=["idle", "in a window"])
async def test_a_killed_server_leaves_no_engine_behind(in_window: bool) -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ORPHAN_MAKER.format(in_window=in_window)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert server.stdout is not None
    pid = int(await server.stdout.readline())
    assert is_alive(pid)
    server.kill()
    await server.communicate()
    await asyncio.wait_for(wait_until(lambda: not is_alive(pid)), 5.0)


async def test_the_engines_log_reaches_ours(caplog: pytest.LogCaptureFixture) -> None:
    """A traceback in the engine is logged there, sent as a message, and logged here under its name."""
    script = FakeScript(faults=(Fault(window=0, kind=FaultKind.ERROR),))
    with caplog.at_level(logging.INFO, logger="engine"):
        async with running(script) as scheduler:
            await error_of(scheduler.submit(make_request()))
    assert any(r.name == "engine" and "window failed" in r.message for r in caplog.records)


def test_the_scheduler_and_the_scripted_engine_import_no_torch() -> None:
    code = (
        "import sys, scheduler.factory, engine.worker; "
        "sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


UVLOOP_LIFE = """
import asyncio, os, signal, uvloop
from scheduler.factory import build_scheduler
from tests.factories import collect, make_request, wait_until
from tests.fault.test_engine_process import SLOW, config, engine_pid

async def main():
    scheduler = build_scheduler(config(SLOW))
    await scheduler.start()
    handle = scheduler.submit(make_request(max_tokens=1000))
    await anext(handle)
    os.kill(engine_pid(scheduler), signal.SIGKILL)
    print((await collect(handle)).last.error)
    await wait_until(lambda: scheduler.ready)
    print((await collect(scheduler.submit(make_request()))).last.reason)
    await scheduler.stop(0.0)
    print(scheduler.engine_state)

asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
"""


def test_the_engine_process_works_under_uvloop() -> None:
    """The server's own loop, which watches children in its own way."""
    pytest.importorskip("uvloop")
    life = subprocess.run(
        [sys.executable, "-c", UVLOOP_LIFE], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert life.stdout.splitlines() == [
        "the engine process was ended by SIGKILL",
        "length",
        "closed",
    ]
