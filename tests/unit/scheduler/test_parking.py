"""When prompts are parked, what of them, and when nothing is."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from cache.config import CacheConfig
from engine.fake import FakeEngine, FakeFiles, FakeScript, Fault, FaultKind
from scheduler.config import SchedulerConfig
from scheduler.errors import EngineDead
from scheduler.messages import Failed
from scheduler.parking import checkpoint_positions, free_host_bytes
from tests.factories import expected_ids, make_request
from tests.property.schedules import Asked, Server

TURN = 7
SCRIPT = FakeScript(
    num_slots=2,
    chunk_tokens=16,
    max_context=512,
    vocab_size=100,
    page_bytes=10,
    checkpoint_bytes=25,
)
CACHE = CacheConfig(min_free_bytes=0, capacity_bytes=10_000)
CONFIG = SchedulerConfig(turn_token_id=TURN, cache=CACHE)
PROMPT = (TURN, *range(10, 60), TURN, 8)
LONGER = (*PROMPT, 20, 21, TURN, 30, TURN, 8)


def server(script: FakeScript = SCRIPT, config: SchedulerConfig = CONFIG) -> Server:
    return Server(FakeEngine(script), config)


def cached(asked: Asked) -> int:
    assert asked.usage is not None
    return asked.usage.cached_tokens


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ((1,), set[int]()),
        ((TURN, 1, 2), set[int]()),
        ((TURN, 1, TURN, 2), {2}),
        ((TURN, 1, TURN, 2, 2, TURN, 3), {5}),
        ((TURN, *(1,) * 20, TURN, 2, 2, TURN, 3), {21, 24}),
        ((1,) * 16, set[int]()),
        ((1,) * 17, {16}),
        ((1,) * 70, {32, 64}),
        ((1,) * 160, {64, 128, 144}),
        ((TURN, *(1,) * 68, TURN), {32, 64, 69}),
    ],
)
def test_where_a_prompt_gets_checkpoints(prompt: tuple[int, ...], expected: set[int]) -> None:
    config = CacheConfig(min_shared_tokens=20, checkpoint_every_tokens=30, max_checkpoints=4)
    found = checkpoint_positions(prompt, chunk_tokens=16, turn_token_id=TURN, config=config)
    assert found == expected


@pytest.mark.parametrize("length", [100, 1000, 5000, 100_000])
def test_a_conversation_has_few_checkpoints(length: int) -> None:
    config = CacheConfig(min_shared_tokens=20, checkpoint_every_tokens=32)
    prompt = (TURN, *(1,) * 50, TURN, *(1,) * length, TURN, 2)
    found = checkpoint_positions(prompt, chunk_tokens=16, turn_token_id=TURN, config=config)
    assert 2 < len(found) <= config.max_checkpoints


def test_a_follow_up_reads_only_what_is_new() -> None:
    subject = server()
    first = subject.complete(make_request(prompt_ids=PROMPT))
    assert cached(first) == 0
    second = subject.complete(make_request(prompt_ids=LONGER))
    assert cached(second) == len(PROMPT) - 2
    assert tuple(second.token_ids) == expected_ids(SCRIPT, second.request)
    assert subject.roster.totals().prompt_tokens == len(LONGER) + 2
    assert cached(subject.complete(make_request(prompt_ids=LONGER, owner="bob"))) == 0
    subject.close()


def test_what_is_no_cut_of_the_new_prompt_is_not_resumed() -> None:
    """Where the next token is no turn, a fresh reading would not stop: its state there is another one."""
    subject = server()
    subject.complete(make_request(prompt_ids=PROMPT))
    changed = (*PROMPT[:-2], 99, 99, 99)
    asked = subject.complete(make_request(prompt_ids=changed))
    assert cached(asked) == 0
    subject.close()


def test_a_cancelled_request_leaves_its_last_good_checkpoint() -> None:
    subject = server()
    asked = subject.ask(make_request(prompt_ids=LONGER, max_tokens=400))
    for _ in range(9):
        subject.run_window()
    assert asked.handle.first_token_s is not None
    asked.handle.cancel()
    while subject.run_window():
        pass
    again = subject.complete(make_request(prompt_ids=(*LONGER, 1, 1, TURN, 2)))
    assert cached(again) == len(LONGER) - 2
    subject.close()


def test_a_request_cancelled_while_it_is_read_leaves_nothing_unread() -> None:
    config = replace(CONFIG, cache=replace(CACHE, checkpoint_every_tokens=16))
    subject = server(config=config)
    asked = subject.ask(make_request(prompt_ids=PROMPT))
    subject.run_window()
    subject.run_window()
    asked.handle.cancel()
    while subject.run_window():
        pass
    assert cached(subject.complete(make_request(prompt_ids=PROMPT))) == 32
    subject.close()


def test_a_sequence_whose_state_is_broken_leaves_nothing() -> None:
    fault = Fault(window=6, kind=FaultKind.SLOT, slot=0)
    subject = server(replace(SCRIPT, faults=(fault,)))
    asked = subject.ask(make_request(prompt_ids=PROMPT, max_tokens=300))
    for _ in range(8):
        subject.run_window()
    assert asked.handle.ended
    assert cached(subject.complete(make_request(prompt_ids=LONGER))) == 0
    subject.close()


def test_a_sequence_that_never_got_into_its_slot_saves_nothing_from_it() -> None:
    subject = server()
    subject.complete(make_request(prompt_ids=PROMPT))
    asked = subject.ask(make_request(prompt_ids=LONGER, deadline_s=1.0))
    subject.roster.seat_waiting()
    subject.clock.advance(2.0)
    while subject.run_window():
        pass
    assert asked.handle.ended
    assert subject.roster.parking_stats().parked == 1
    subject.close()


def test_an_overdue_request_is_parked_like_a_finished_one() -> None:
    subject = server()
    subject.ask(make_request(prompt_ids=PROMPT, max_tokens=400, deadline_s=1.0))
    while subject.run_window():
        pass
    assert cached(subject.complete(make_request(prompt_ids=LONGER))) == len(PROMPT) - 2
    subject.close()


@pytest.mark.parametrize(
    "cache", [replace(CACHE, max_conversations=0), replace(CACHE, capacity_bytes=0)]
)
def test_a_store_without_room_is_off(cache: CacheConfig) -> None:
    subject = server(config=replace(CONFIG, cache=cache))
    subject.complete(make_request(prompt_ids=PROMPT))
    assert cached(subject.complete(make_request(prompt_ids=LONGER))) == 0
    stats = subject.roster.parking_stats()
    assert (stats.lookups, stats.parked, stats.refused) == (0, 0, 0)


def test_below_the_floor_of_free_memory_nothing_is_parked_and_it_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    subject = server()
    free = 100
    subject.roster._parking._config = replace(CACHE, min_free_bytes=101)
    subject.roster._parking._free_bytes = lambda: free
    with caplog.at_level(logging.INFO, "scheduler.parking"):
        for _ in range(2):
            assert cached(subject.complete(make_request(prompt_ids=PROMPT))) == 0
        free = 200
        subject.complete(make_request(prompt_ids=PROMPT))
        assert cached(subject.complete(make_request(prompt_ids=PROMPT))) > 0
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "nothing is parked: 100 bytes of memory are free, the floor is 101",
        "parking goes on: 200 bytes of memory are free",
    ]


def test_free_memory_is_known_on_linux() -> None:
    free = free_host_bytes()
    assert free is None or free > 0


def test_a_new_engine_knows_nothing() -> None:
    subject = server()
    subject.complete(make_request(prompt_ids=PROMPT))
    subject.engine = FakeEngine(SCRIPT)
    subject.roster.follow_engine(2)
    assert cached(subject.complete(make_request(prompt_ids=LONGER))) == 0
    subject.close()


def test_whoever_sat_in_an_engine_that_is_gone_fails() -> None:
    config = replace(CONFIG, preempt_wait_s=0.0, preempt_run_s=0.0)
    subject = server(config=config)
    everyone = [subject.ask(make_request(prompt_ids=PROMPT[i:], max_tokens=200)) for i in range(3)]
    while subject.roster.totals().preemptions == 0:
        subject.run_window()
    subject.run_window()
    subject.roster.follow_engine(2)
    ended = 0
    for asked in everyone:
        events = list(asked.handle._events)
        if events and isinstance(events[-1], Failed):
            assert isinstance(events[-1].error, EngineDead)
            ended += 1
    assert ended == 3
    subject.roster.check_invariants()


def test_a_decoding_request_gives_way_and_goes_on_later() -> None:
    config = replace(CONFIG, preempt_wait_s=0.5, preempt_run_s=0.5, max_preemptions=1)
    subject = server(config=config)
    long = [subject.ask(make_request(prompt_ids=PROMPT[i:], max_tokens=300)) for i in range(2)]
    for _ in range(10):
        subject.run_window()
    short = subject.ask(make_request(prompt_ids=(9, 9), max_tokens=2))
    while not short.handle.ended:
        subject.run_window()
    assert not any(asked.handle.ended for asked in long)
    while subject.run_window():
        pass
    for asked in (*long, short):
        asked.read()
        assert tuple(asked.token_ids) == expected_ids(SCRIPT, asked.request)
    assert subject.roster.totals().preemptions == 1
    subject.close()


def test_without_room_for_its_state_nobody_gives_way() -> None:
    cache = replace(CACHE, capacity_bytes=30)
    config = replace(CONFIG, cache=cache, preempt_wait_s=0.0, preempt_run_s=0.0)
    subject = server(config=config)
    everyone = [subject.ask(make_request(prompt_ids=PROMPT[i:], max_tokens=60)) for i in range(3)]
    while subject.run_window():
        pass
    for asked in everyone:
        asked.read()
        assert tuple(asked.token_ids) == expected_ids(SCRIPT, asked.request)
    assert subject.roster.totals().preemptions == 0
    subject.close()


def test_a_suspended_request_that_is_cancelled_leaves_nothing() -> None:
    config = replace(CONFIG, preempt_wait_s=0.0, preempt_run_s=0.0)
    subject = server(config=config)
    everyone = [subject.ask(make_request(prompt_ids=PROMPT[i:], max_tokens=300)) for i in range(3)]
    while subject.roster.totals().preemptions == 0:
        subject.run_window()
    for asked in everyone:
        asked.handle.cancel()
    while subject.run_window():
        pass
    subject.close()


def suspend_one(subject: Server, others: list[Asked]) -> Asked:
    """A follow-up of PROMPT's conversation that has given its slot to others and waits."""
    asked = subject.ask(make_request(prompt_ids=LONGER, max_tokens=300, deadline_s=30.0))
    for i in range(2):
        subject.run_window()
        others.append(subject.ask(make_request(prompt_ids=(9, 9 + i), max_tokens=300, priority=1)))
    while asked.request.request_id in {v.request_id for v in subject.roster.slot_views()}:
        subject.run_window()
    assert subject.roster.totals().preemptions == 1
    return asked


@pytest.mark.parametrize("orders_sent", [False, True])
@pytest.mark.parametrize("end", ["cancelled", "overdue", "engine gone"])
def test_a_turn_that_ends_while_it_is_suspended_is_as_if_it_had_never_run(
    end: str, orders_sent: bool
) -> None:
    """What the turns before have left is found, nothing of this one, and nothing is held for it."""
    config = replace(CONFIG, preempt_wait_s=0.5, preempt_run_s=0.2)
    subject = server(config=config)
    first = subject.complete(make_request(prompt_ids=PROMPT))
    kept = subject.roster.parking_stats().num_bytes
    others: list[Asked] = []
    asked = suspend_one(subject, others)
    if orders_sent:
        subject.run_window()
    if end == "engine gone":
        subject.engine = FakeEngine(SCRIPT)
        subject.roster.follow_engine(2)
        kept = 0
    elif end == "overdue":
        subject.clock.advance(40.0)
    else:
        asked.handle.cancel()
    for other in others:
        other.handle.cancel()
    while subject.run_window():
        pass
    assert asked.handle.ended
    stats = subject.roster.parking_stats()
    assert stats.num_bytes == kept
    assert stats.num_conversations == (1 if kept else 0)
    again = subject.complete(make_request(prompt_ids=LONGER))
    assert cached(again) == (len(PROMPT) - 2 if kept else 0)
    assert tuple(again.token_ids) == expected_ids(SCRIPT, again.request)
    assert tuple(first.token_ids) == expected_ids(SCRIPT, first.request)
    subject.close()


def test_a_refused_window_takes_what_it_should_have_written_with_it() -> None:
    subject = server()
    subject.complete(make_request(prompt_ids=PROMPT))
    subject.ask(make_request(prompt_ids=LONGER))
    subject.roster.seat_waiting()
    while True:
        plan = subject.roster.plan()
        assert plan is not None
        if any(chunk.checkpoint_id is not None for chunk in plan.chunks):
            break
        subject.roster.apply(plan, subject.engine.run_window(plan), 0.1)
    subject.roster.window_refused(RuntimeError("as told"))
    subject.roster.check_invariants()
    assert cached(subject.complete(make_request(prompt_ids=LONGER))) == 0
    assert cached(subject.complete(make_request(prompt_ids=LONGER))) > 0
    subject.close()


def test_a_slot_without_a_tenant_is_left_alone() -> None:
    subject = server()
    subject.ask(make_request())
    subject.roster.seat_waiting()
    (slot,) = subject.roster._table
    parking = subject.roster._parking
    parking.forget(slot.sequence)
    parking.left(slot)
    assert not parking.suspend(slot)


@pytest.mark.parametrize("files", [None, FakeFiles()], ids=["memory", "disk"])
def test_nothing_is_ordered_of_an_engine_that_is_lost(files: FakeFiles | None) -> None:
    """Or the loop would ask the dead engine again and again, and never sleep."""
    subject = Server(FakeEngine(SCRIPT, files=files), CONFIG)
    asked = subject.ask(make_request(prompt_ids=PROMPT))
    while not asked.handle.ended:
        subject.run_window()
    assert subject.roster._parking.has_orders
    subject.roster.engine_lost(EngineDead("as told"))
    assert subject.roster.plan() is None


def test_whoever_waits_for_a_new_engine_gets_what_it_has_on_disk() -> None:
    files = FakeFiles()
    subject = Server(FakeEngine(SCRIPT, files=files), CONFIG)
    subject.complete(make_request(prompt_ids=PROMPT))
    subject.roster.engine_lost(EngineDead("as told"))
    asked = subject.ask(make_request(prompt_ids=LONGER))
    subject.restart(FakeEngine(SCRIPT, files=files))
    while subject.run_window():
        pass
    asked.read()
    assert cached(asked) == len(PROMPT) - 2
