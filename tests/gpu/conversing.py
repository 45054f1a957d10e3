"""Conversations on two slots, as tests of parking hold them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from engine.engine import TorchEngine
from engine.interface import SamplingParams
from scheduler.config import CacheConfig, SchedulerConfig
from tests.factories import make_request
from tests.property.schedules import TURN_ID, Server, Texts

_GREEDY = SamplingParams(temperature=0.0)


def converse(server: Server, texts: Texts) -> tuple[list[list[int]], int]:
    """Three conversations of three turns on two slots: what was said, and how many tokens were not read again."""
    rng = Random(1)
    prompts = [(TURN_ID, *texts.words(rng, 150 + i)) for i in range(3)]
    said: list[list[int]] = []
    num_cached = 0
    for _ in range(3):
        turns = [prompt + texts.user_turn(rng) for prompt in prompts]
        requests = [make_request(prompt_ids=turn, max_tokens=40, max_draft=0) for turn in turns]
        batch = [server.ask(replace(request, sampling=_GREEDY)) for request in requests]
        while server.run_window():
            pass
        for one in batch:
            one.read()
            assert one.usage is not None
            num_cached += one.usage.cached_tokens
        said += [one.token_ids for one in batch]
        prompts = [one.request.prompt_ids + tuple(one.token_ids) for one in batch]
    return said, num_cached


def parking_changes_no_text(engine: TorchEngine) -> None:
    """The same conversations, parked and restored beside running windows, and never parked."""
    parking = SchedulerConfig(
        turn_token_id=TURN_ID,
        cache=CacheConfig(min_free_bytes=0, min_shared_tokens=64),
        preempt_wait_s=0.3,
        preempt_run_s=0.3,
    )
    plain = replace(parking, cache=CacheConfig(max_conversations=0))
    texts = Texts(vocab_size=8000, system_tokens=1, user_tokens=90, max_tokens=40, max_prompt=900)
    found = [converse(Server(engine, one), texts) for one in (parking, plain)]
    assert found[0][0] == found[1][0]
    assert found[0][1] > 500
    assert found[1][1] == 0
