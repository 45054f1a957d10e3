from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from engine.fake import FakeScript, Fault, FaultKind
from engine.interface import PlanItem
from gateway.app import build_app
from gateway.config import ApiKey, GatewayConfig
from gateway.metrics import RecentTokens
from gateway.server import build_service
from scheduler.stats import Outcome
from tests.conformance.live import default_files
from tests.factories import make_request, make_scheduler, wait_until
from tests.unit.gateway.asgi import asgi_client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import httpx

    from scheduler.service import Scheduler


@asynccontextmanager
async def served(
    script: FakeScript | None = None, *, config: GatewayConfig | None = None
) -> AsyncGenerator[tuple[httpx.AsyncClient, Scheduler]]:
    """A client of the whole application over a started scheduler."""
    scheduler = make_scheduler(script)
    await scheduler.start()
    try:
        service = build_service(config or GatewayConfig(), scheduler, default_files(), "1.2.3")
        async with asgi_client(build_app(service)) as client:
            yield client, scheduler
    finally:
        await scheduler.stop(0.0)


async def status_of(client: httpx.AsyncClient) -> dict[str, Any]:
    response = await client.get("/v1/status")
    assert response.status_code == 200
    return response.json()


async def test_an_idle_server() -> None:
    async with served() as (client, _):
        status = await status_of(client)
    assert status["object"] == "status"
    assert (status["version"], status["ready"], status["draining"]) == ("1.2.3", True, False)
    assert status["engine"] == {"state": "ready", "restarts": 0}
    assert status["queue"] == {"length": 0}
    assert status["model"]["id"] == "scripted"
    assert status["model"]["kv_dtype"] == "none"
    assert status["model"]["max_context"] == 4096
    assert 0 <= status["uptime_s"] < 20
    assert [slot["phase"] for slot in status["slots"]] == ["free"] * 4
    assert status["tokens"] == {"prompt": 0, "completion": 0, "per_s": 0.0, "window_s": 5}
    assert [depth["depth"] for depth in status["drafts"]["by_depth"]] == [1, 2, 3, 4]
    assert set(status["requests"]["outcomes"]) == set(Outcome)
    assert status["store"]["conversations"] == 0
    assert status["store"]["capacity_bytes"] == 8 * 2**30
    assert status["memory_plan"] == []


async def test_busy_slots_the_queue_and_drafts_are_counted() -> None:
    async with served(FakeScript(decode_s=0.02)) as (client, scheduler):
        requests = [make_request(request_id="secret", max_tokens=2000) for _ in range(6)]
        handles = [scheduler.submit(request) for request in requests]
        await wait_until(lambda: scheduler.stats().totals.drafts_accepted[3] > 0)
        status = await status_of(client)
        for handle in handles:
            handle.cancel()
    assert status["queue"] == {"length": 2}
    for slot in status["slots"]:
        assert slot["phase"] == "decoding"
        assert slot["prompt_tokens"] == slot["read_tokens"] == 3
        assert slot["output_tokens"] > 0
    for depth in status["drafts"]["by_depth"]:
        assert depth["offered"] >= depth["accepted"] > 0
    assert status["tokens"]["prompt"] == 12
    assert status["tokens"]["completion"] >= 4
    assert status["requests"]["submitted"] == 6
    assert "secret" not in str(status)


async def test_delivered_tokens_make_the_rate() -> None:
    async with served() as (client, _):
        body = {"model": "default", "prompt": "a secret", "max_tokens": 50, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        status = await status_of(client)
    assert status["tokens"]["completion"] == 50
    assert status["tokens"]["per_s"] >= 50 / 6
    assert status["requests"]["outcomes"]["length"] == 1
    assert "secret" not in str(status)


async def test_the_memory_plan_is_shown() -> None:
    async with served() as (client, scheduler):
        plan = (
            PlanItem(name="head", planned_bytes=10, actual_bytes=9),
            PlanItem(name="window", planned_bytes=5, actual_bytes=None),
        )
        object.__setattr__(scheduler.info, "memory_plan", plan)
        status = await status_of(client)
    assert status["memory_plan"] == [
        {"name": "head", "planned_bytes": 10, "actual_bytes": 9},
        {"name": "window", "planned_bytes": 5, "actual_bytes": None},
    ]


async def test_a_restarted_engine_is_counted() -> None:
    script = FakeScript(faults=(Fault(window=0, kind=FaultKind.KERNEL),))
    async with served(script) as (client, scheduler):
        handle = scheduler.submit(make_request())
        async with asyncio.timeout(5):
            async for _ in handle:
                pass
        await wait_until(lambda: scheduler.ready)
        status = await status_of(client)
    assert status["engine"] == {"state": "ready", "restarts": 1}
    assert status["requests"]["outcomes"]["engine_dead"] == 1


async def test_it_needs_a_key_where_keys_are_set() -> None:
    config = GatewayConfig(api_keys=(ApiKey(name="ann", secret="a-1"),))
    async with served(config=config) as (client, _):
        assert (await client.get("/v1/status")).status_code == 401
        response = await client.get("/v1/status", headers={"authorization": "Bearer a-1"})
        assert response.status_code == 200
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/page/main.js")).status_code == 200


def test_the_rate_forgets_what_is_older_than_its_window() -> None:
    recent = RecentTokens()
    for second in range(100, 110):
        recent.add(second + 0.5, 20)
    assert recent.per_s(110.0, 1000.0) == pytest.approx(20.0)
    assert recent.per_s(112.0, 1000.0) == pytest.approx(10.0)
    assert recent.per_s(200.0, 1000.0) == 0.0
    recent.add(200.9, 7)
    assert recent.per_s(200.95, 1000.0) == pytest.approx(7 / 4.95)


def test_a_young_server_is_not_averaged_over_time_it_did_not_live() -> None:
    recent = RecentTokens()
    recent.add(50.5, 30)
    assert recent.per_s(51.5, 1.5) == pytest.approx(20.0)
    assert recent.per_s(51.5, 0.1) == pytest.approx(30.0)
