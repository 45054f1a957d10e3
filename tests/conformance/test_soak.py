"""Hundreds of short requests over HTTP whose clients come back, leave in the middle, or never read: nothing stays."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from random import Random

import httpx
import pytest

from cache.config import CacheConfig
from engine.fake import FakeScript
from scheduler.config import SchedulerConfig
from scheduler.stats import Outcome
from tests.conformance.live import Live, live_server
from tests.factories import FAST_SUPERVISION

pytestmark = pytest.mark.timeout(120)

SCRIPT = FakeScript(page_bytes=100, checkpoint_bytes=1000, chunk_tokens=64)
CONFIG = SchedulerConfig(
    supervision=FAST_SUPERVISION,
    max_queue=100,
    cache=CacheConfig(capacity_bytes=30_000, min_free_bytes=0, min_shared_tokens=16),
    preempt_wait_s=0.02,
    preempt_run_s=0.01,
)
NUM_CLIENTS = 8
WARM_UP, REQUESTS = 10, 30
"""Of each client."""
GROWTH_KIB = 8192
STATUS = Path("/proc/self/status")


def anonymous_kib() -> int:
    """Resident memory of this process, which is server and clients, that no file backs."""
    gc.collect()
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


async def client(live: Live, number: int, num_requests: int) -> int:
    """Requests of one client, new conversations and follow-ups; returns how many it left before their end."""
    rng = Random(1000 * number + num_requests)
    history: list[dict[str, str]] = []
    num_left = 0
    async with httpx.AsyncClient(base_url=live.url, timeout=30.0, verify=False) as http:
        for turn in range(num_requests):
            if rng.random() < 0.3:
                history = [{"role": "system", "content": "Be brief. " * rng.randint(0, 12)}]
            history.append({"role": "user", "content": f"Say {turn} " * rng.randint(1, 9)})
            body = {
                "model": "scripted",
                "messages": history[-8:],
                "max_tokens": rng.randint(1, 40),
                "stream": True,
            }
            leaves_after = rng.choice([None, None, None, 0, 1, 5])
            async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                assert reply.status_code == 200
                num_lines = 0
                async for line in reply.aiter_lines():
                    num_lines += bool(line)
                    if leaves_after is not None and num_lines > leaves_after:
                        num_left += 1
                        break
            history.append({"role": "assistant", "content": "So it is."})
    return num_left


async def run(live: Live, num_requests: int) -> int:
    left = await asyncio.gather(*(client(live, i, num_requests) for i in range(NUM_CLIENTS)))
    await live.wait_idle()
    return sum(left)


# Flat memory is half of what is promised here, and only Linux's /proc tells anonymous memory from mapped files.
@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
async def test_nothing_stays_of_clients_that_come_and_go() -> None:
    async with live_server(SCRIPT, scheduler_config=CONFIG) as live:
        await run(live, WARM_UP)
        warm = anonymous_kib()
        num_left = await run(live, REQUESTS)
        assert anonymous_kib() - warm < GROWTH_KIB
        stats = live.scheduler.stats()
        assert stats.parking is not None
        assert stats.totals.submitted == NUM_CLIENTS * (WARM_UP + REQUESTS)
        assert min(num_left, stats.parking.hits, stats.parking.evictions) > 15
        assert dict(stats.totals.outcomes)[Outcome.CANCELLED] > 10
        roster = live.scheduler._roster
        assert roster is not None
        roster.check_invariants()
        assert not roster._parking._tenants
        store = roster._parking._store
        store.evict_all()
        assert store.num_bytes == 0
