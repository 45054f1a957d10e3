"""Thousands of short requests whose callers come and go leave nothing behind."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from engine.fake import FakeEngine, FakeScript
from engine.interface import SamplingParams
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.messages import GenerateRequest
from tests.factories import expected_ids
from tests.property.schedules import TURN_ID, Asked, Server, Texts

SCRIPT = FakeScript(chunk_tokens=32, max_context=512, page_bytes=100, checkpoint_bytes=1000)
TEXTS = Texts(vocab_size=8192, system_tokens=80, user_tokens=60, max_tokens=12, max_prompt=400)
CONFIG = SchedulerConfig(
    max_queue=100,
    turn_token_id=TURN_ID,
    cache=CacheConfig(capacity_bytes=30_000, min_free_bytes=0, min_shared_tokens=40),
    preempt_wait_s=0.5,
    preempt_run_s=0.2,
)
NUM_REQUESTS = 5000
WARM_UP = 1000
GROWTH_KIB = 4096
STATUS = Path("/proc/self/status")


def anonymous_kib() -> int:
    """Resident memory of this process that no file backs."""
    gc.collect()
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.slow
@pytest.mark.timeout(600)
# Only Linux's /proc tells anonymous memory from mapped files; nothing else is measured here.
@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
def test_nothing_grows() -> None:
    engine = FakeEngine(SCRIPT)
    server = Server(engine, CONFIG, engine.parked_ids)
    rng = Random(0)
    live: list[Asked] = []
    recent: list[GenerateRequest] = []
    warm = 0
    for number in range(NUM_REQUESTS):
        if number == WARM_UP:
            warm = anonymous_kib()
        live.append(server.ask(next_request(rng, number, recent)))
        recent = [*recent[-20:], live[-1].request]
        for asked in live:
            if rng.random() < 0.02:
                asked.handle.cancel()
        while len(live) > 8 or (live and rng.random() < 0.7):
            server.run_window()
            live = [asked for asked in live if not is_over(asked)]
    while server.run_window():
        pass
    assert anonymous_kib() - warm < GROWTH_KIB
    stats, totals = server.roster.parking_stats(), server.roster.totals()
    assert totals.submitted == NUM_REQUESTS
    assert min(stats.hits, stats.evictions, totals.preemptions) > 50
    assert all(view.request_id is None for view in server.roster.slot_views())
    server.close()
    assert engine.parked_ids() == (frozenset(), frozenset())


def next_request(rng: Random, number: int, recent: list[GenerateRequest]) -> GenerateRequest:
    """A new conversation, or one more turn of a recent one."""
    if recent and rng.random() < 0.6:
        previous = rng.choice(recent)
        answer = expected_ids(SCRIPT, previous)
        prompt = (previous.prompt_ids + answer + TEXTS.user_turn(rng))[: TEXTS.max_prompt]
        return replace(previous, request_id=f"request-{number}", prompt_ids=prompt)
    return GenerateRequest(
        request_id=f"request-{number}",
        prompt_ids=TEXTS.opening(rng) + TEXTS.user_turn(rng),
        sampling=SamplingParams(seed=number),
        max_tokens=rng.randint(1, TEXTS.max_tokens),
        owner=rng.choice(["ann", "bob"]),
    )


def is_over(asked: Asked) -> bool:
    """Whether it has ended; then its tokens are what they should be."""
    if asked.handle.cancelled:
        return True
    asked.read()
    if asked.usage is None:
        return False
    assert tuple(asked.token_ids) == expected_ids(SCRIPT, asked.request)
    return True
