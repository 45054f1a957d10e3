"""A model over two stages behind the real engine process: served, and lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.interface import SamplingParams
from engine.loading import load_engine
from scheduler.config import SchedulerConfig
from scheduler.errors import EngineDead
from scheduler.factory import build_scheduler
from scheduler.messages import Failed, Finished, Tokens
from scheduler.stats import EngineState
from tests.factories import FAST_SUPERVISION, collect, make_request, wait_until
from tests.fault.test_engine_process import engine_pid, is_alive
from tests.oracle import tiny
from tests.oracle.conftest import engine_config
from tests.property.schedules import Solo


def stage_pids(engine: int) -> list[int]:
    """Processes that the engine process has started."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except FileNotFoundError:
            continue
        if int(fields[1]) == engine and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


async def lose_a_stage(engine: EngineConfig, solo: Solo) -> list[int]:
    """Serve with two stages, kill one in the middle; the processes that were there. solo: what one device gives."""
    requests = [
        replace(
            make_request(prompt_ids=tuple(range(3, 40 + 9 * n)), max_tokens=12, seed=n),
            sampling=SamplingParams(temperature=float(n % 2), seed=n),
        )
        for n in range(6)
    ]
    supervision = replace(FAST_SUPERVISION, load_timeout_s=120.0)
    config = SchedulerConfig(engine=replace(engine, num_groups=2), supervision=supervision)
    scheduler = build_scheduler(config)
    await scheduler.start()
    try:
        everything = await asyncio.gather(*(collect(scheduler.submit(r)) for r in requests))
        for request, collected in zip(requests, everything, strict=True):
            assert isinstance(collected.last, Finished)
            assert collected.token_ids == solo.tokens(request, None)
        handles = [scheduler.submit(make_request(max_tokens=200)) for _ in range(3)]
        assert isinstance(await anext(handles[0]), Tokens)
        pid = engine_pid(scheduler)
        (stage,) = stage_pids(pid)
        os.kill(stage, signal.SIGKILL)
        killed_at = time.monotonic()
        lasts = [(await collect(handle)).last for handle in handles]
        assert time.monotonic() - killed_at < 1.0
        for last in lasts:
            assert isinstance(last, Failed)
            assert isinstance(last.error, EngineDead)
            assert re.search(r"stage 0 \(.*\) ended with status -9", str(last.error))
        assert scheduler.engine_state is EngineState.RESTARTING
        await wait_until(lambda: not is_alive(pid))
    finally:
        await scheduler.stop(0.0)
    return [pid, stage]


# Which processes are stages nobody outside the engine is told, so the test looks among its children.
@pytest.mark.timeout(90)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the stages' processes in /proc")
async def test_a_lost_stage_is_a_crash_of_the_engine(tmp_path: Path) -> None:
    checkpoint = tiny.make_checkpoint(tmp_path, "mha_gdn1_two_streams")
    engine = replace(engine_config(checkpoint), kernels="torch")
    assert not any(map(is_alive, await lose_a_stage(engine, Solo(load_engine(engine)))))
