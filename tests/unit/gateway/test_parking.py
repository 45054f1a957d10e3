"""What an operator sees of parked conversations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.config import CacheConfig
from engine.fake import FakeEngine, FakeFiles, FakeScript
from gateway.metrics import Metrics
from gateway.report import _parking
from scheduler.config import SchedulerConfig
from scheduler.roster import Roster
from tests.factories import FAST_SUPERVISION, FakeClock, collect, make_request, make_scheduler

CONFIG = SchedulerConfig(supervision=FAST_SUPERVISION, cache=CacheConfig(min_free_bytes=0))


async def test_parked_conversations_are_counted() -> None:
    scheduler = make_scheduler(config=CONFIG)
    before = Metrics(scheduler.stats).render().decode()
    assert "stratagate_parked_conversations" not in before
    await scheduler.start()
    prompt = tuple(range(100))
    for _ in range(2):
        await collect(scheduler.submit(make_request(prompt_ids=prompt)))
    lines = Metrics(scheduler.stats).render().decode().splitlines()
    await scheduler.stop(1.0)
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["stratagate_parked_conversations"] == "1.0"
    assert float(values["stratagate_parked_bytes"]) > 0
    assert float(values["stratagate_parked_bytes_limit"]) == CONFIG.cache.capacity_bytes
    assert values["stratagate_parking_lookups_total"] == "2.0"
    assert values["stratagate_parking_hits_total"] == "1.0"
    assert values["stratagate_resumed_tokens_total"] == "64.0"
    assert values["stratagate_parking_evictions_total"] == "0.0"
    assert values["stratagate_preemptions_total"] == "0.0"


def test_files_are_counted() -> None:
    files = FakeFiles()
    roster = Roster(CONFIG, FakeEngine(FakeScript(), files=files).info, FakeClock())
    parking, disk = roster.parking_stats(), roster.disk_stats()
    assert disk is not None
    disk = replace(disk, num_files=2, num_bytes=300, hits=4, written=5, evictions=6, failures=7)
    stats = replace(make_scheduler().stats(), parking=parking, disk=disk)
    lines = Metrics(lambda: stats).render().decode().splitlines()
    values = {
        name.removeprefix("stratagate_disk_"): float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if "_disk_" in line)
        if not name.startswith("#")
    }
    assert values == {
        "conversations": 2,
        "bytes": 300,
        "bytes_limit": CONFIG.cache.disk_bytes,
        "hits_total": 4,
        "written_total": 5,
        "evictions_total": 6,
        "failures_total": 7,
    }


async def test_the_report_says_how_much_is_kept() -> None:
    scheduler = make_scheduler(config=CONFIG)
    await scheduler.start()
    store = scheduler.stats().parking
    await scheduler.stop(1.0)
    assert store is not None
    assert _parking(store) == "up to 20 conversations in 8192 MiB"


@pytest.mark.parametrize("limit", ["max_conversations", "capacity_bytes"])
async def test_the_report_says_when_nothing_is_kept(limit: str) -> None:
    off = replace(CONFIG, cache=replace(CONFIG.cache, **{limit: 0}))
    scheduler = make_scheduler(config=off)
    await scheduler.start()
    store = scheduler.stats().parking
    await scheduler.stop(1.0)
    assert _parking(store) == "off"
