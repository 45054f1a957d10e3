"""Choices of one prompt: it is read once, whoever comes, leaves or fails in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.config import CacheConfig
from engine.fake import FakeEngine, FakeScript, Fault, FaultKind
from scheduler.config import SchedulerConfig
from tests.factories import expected_ids, make_request
from tests.property.schedules import Asked, Server

TURN = 7
SCRIPT = FakeScript(num_slots=4, chunk_tokens=16, max_context=512, vocab_size=100)
CACHE = CacheConfig(min_free_bytes=0)
CONFIG = SchedulerConfig(turn_token_id=TURN, cache=CACHE)
PROMPT = (TURN, *range(10, 90), TURN, 8)
BEHIND = 2
"""Tokens behind its checkpoint, which each choice reads itself."""


def server(script: FakeScript = SCRIPT, config: SchedulerConfig = CONFIG) -> Server:
    engine = FakeEngine(script)
    parked = engine._parked
    return Server(
        engine, config, held=lambda: (frozenset(parked.pages), frozenset(parked.checkpoints))
    )


def ask_choices(
    subject: Server, count: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 20
) -> list[Asked]:
    asked: list[Asked] = []
    for seed in range(count):
        request = make_request(prompt_ids=prompt, seed=seed, max_tokens=max_tokens)
        asked.append(subject.ask(request, asked[0] if asked else None))
    return asked


def run(subject: Server, asked: list[Asked]) -> None:
    while subject.run_window():
        pass
    for item in asked:
        item.read()
        assert tuple(item.token_ids) == expected_ids(SCRIPT, item.request)


@pytest.mark.parametrize("count", [2, 4, 9])
@pytest.mark.parametrize("max_tokens", [1, 20])
def test_one_reads_and_the_others_go_on_from_there(count: int, max_tokens: int) -> None:
    subject = server()
    asked = ask_choices(subject, count, max_tokens=max_tokens)
    run(subject, asked)
    assert subject.roster.totals().prompt_tokens == len(PROMPT) + (count - 1) * BEHIND
    cached = [item.usage.cached_tokens for item in asked if item.usage is not None]
    assert cached == [0] + [len(PROMPT) - BEHIND] * (count - 1)
    subject.close()


def test_others_take_the_slots_that_choices_wait_for() -> None:
    subject = server()
    choices = ask_choices(subject, 4)
    other = subject.ask(make_request(prompt_ids=(1, 2, 3), max_tokens=2))
    subject.run_window()
    assert other.handle.started_s is not None
    assert [item.handle.started_s is None for item in choices] == [False, True, True, True]
    run(subject, [*choices, other])
    subject.close()


@pytest.mark.parametrize("windows", [0, 2, 7])
def test_a_leader_that_leaves_holds_nobody(windows: int) -> None:
    subject = server()
    leader, *others = ask_choices(subject, 4)
    for _ in range(windows):
        subject.run_window()
    leader.handle.cancel()
    run(subject, others)
    subject.close()


def test_a_follower_that_leaves_while_it_is_held_is_gone() -> None:
    subject = server()
    first, second, third = ask_choices(subject, 3)
    subject.run_window()
    second.handle.cancel()
    run(subject, [first, third])
    assert subject.roster.totals().prompt_tokens == len(PROMPT) + BEHIND
    subject.close()


def test_a_leader_that_fails_holds_nobody() -> None:
    fault = Fault(window=5, kind=FaultKind.SLOT, slot=0)
    subject = server(replace(SCRIPT, faults=(fault,)))
    leader, *others = ask_choices(subject, 3)
    run(subject, others)
    assert leader.handle.ended
    subject.close()


@pytest.mark.parametrize(
    ("prompt", "cache"),
    [
        (PROMPT, CacheConfig(max_conversations=0)),
        (PROMPT, replace(CACHE, capacity_bytes=10)),
        (PROMPT, replace(CACHE, min_free_bytes=2**60)),
        ((1, 2, 3), CACHE),  # no place to go on from
    ],
)
def test_where_nothing_can_be_parked_everyone_reads(
    prompt: tuple[int, ...], cache: CacheConfig
) -> None:
    subject = server(config=replace(CONFIG, cache=cache))
    run(subject, ask_choices(subject, 4, prompt))
    assert subject.roster.totals().prompt_tokens == 4 * len(prompt)
    subject.close()


def test_who_has_led_can_still_give_way() -> None:
    config = replace(CONFIG, preempt_wait_s=0.05, preempt_run_s=0.05)
    subject = server(replace(SCRIPT, num_slots=1), config)
    asked = ask_choices(subject, 2, max_tokens=120)
    run(subject, asked)
    assert subject.roster.totals().preemptions > 0
    assert asked[0].usage is not None and asked[1].usage is not None
    assert asked[1].usage.cached_tokens == len(PROMPT) - BEHIND
    subject.close()


def test_it_is_kept_for_the_next_turn_like_any_other() -> None:
    subject = server()
    run(subject, ask_choices(subject, 3))
    longer = subject.complete(make_request(prompt_ids=(*PROMPT, 20, TURN, 30, TURN, 8)))
    assert longer.usage is not None
    assert longer.usage.cached_tokens == len(PROMPT) - BEHIND
    assert subject.roster.parking_stats().num_conversations == 2
    subject.close()
