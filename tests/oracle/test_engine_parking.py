"""Parked and restored equals never parked: token for token, at every cut, with drafts and penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from engine.copy_lane import CopyLane
from engine.engine import TorchEngine
from engine.errors import PlanError
from engine.interface import (
    PAGE_TOKENS,
    DecodeStep,
    PrefillChunk,
    Resume,
    SamplingParams,
    SavePage,
    SlotStart,
    Suspend,
    WindowPlan,
)
from engine.loading import load_engine
from scheduler.config import CacheConfig, SchedulerConfig
from tests.factories import make_request
from tests.oracle import tiny
from tests.oracle.conftest import Models, engine_config
from tests.property.schedules import TURN_ID, Asked, Server, Solo, Texts

PENALIZED = SamplingParams(
    temperature=0.9, seed=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
)
GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 14
NAMES = ("gqa3_gdn2", "mha_gdn1_two_streams", "no_ple")


def decode(engine: TorchEngine, slot: int, count: int, max_draft: int) -> list[int]:
    """At least `count` tokens, then the first of them."""
    ids: list[int] = []
    while len(ids) < count:
        step = DecodeStep(slot=slot, max_draft=max_draft, spec_min_p=0.0)
        ids.extend(engine.run_window(WindowPlan(decodes=(step,))).tokens[0].token_ids)
    return ids[:count]


def read(
    engine: TorchEngine,
    slot: int,
    ids: list[int],
    cuts: list[int],
    start: SlotStart,
    checkpoint_at: int | None = None,
) -> int:
    """Read ids in pieces that end at `cuts`; returns the first output token. A piece may leave checkpoint 1."""
    starts = (start,)
    first = len(start.resume.token_ids) if start.resume else 0
    tokens: list[int] = []
    for end in [*cuts, len(ids)]:
        if end <= first:
            continue
        chunk = PrefillChunk(
            slot=slot,
            start=first,
            token_ids=tuple(ids[first:end]),
            is_last=end == len(ids),
            checkpoint_id=1 if end == checkpoint_at else None,
        )
        result = engine.run_window(WindowPlan(starts=starts, chunks=(chunk,)))
        starts, first = (), end
        if result.tokens:
            tokens = list(result.tokens[0].token_ids)
    return tokens[0]


def pages_for(slot: int, num_tokens: int) -> tuple[SavePage, ...]:
    count = -(-num_tokens // PAGE_TOKENS)
    return tuple(SavePage(slot=slot, page_id=10 + i, index=i) for i in range(count))


def forget(engine: TorchEngine, saves: tuple[SavePage, ...], *checkpoints: int) -> None:
    page_ids = tuple(save.page_id for save in saves)
    engine.run_window(WindowPlan(drop_page_ids=page_ids, drop_checkpoint_ids=checkpoints))


@pytest.mark.parametrize("sampling", [GREEDY, PENALIZED], ids=["greedy", "penalized"])
@pytest.mark.parametrize("cut", [1, 5, 32, 64, 70])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_resumed_at_a_checkpoint_goes_on_as_if_read_whole(
    models: Models, name: str, cut: int, sampling: SamplingParams
) -> None:
    engine = models.engine(name)
    prompt = tiny.text(name, 0)[:85]
    cuts = sorted({cut, 32, 64})
    first = read(engine, 0, prompt, cuts, SlotStart(slot=0, sampling=sampling), checkpoint_at=cut)
    expected = [first, *decode(engine, 0, NUM_TOKENS, 3)]
    # Another text takes another slot, then the slot itself, before the prompt comes back elsewhere.
    saves = pages_for(0, cut)
    engine.run_window(WindowPlan(saves=saves))
    other = tiny.text(name, 1)[:90]
    for slot in (0, 2):
        read(engine, slot, other, [32, 64], SlotStart(slot=slot, sampling=GREEDY))
        decode(engine, slot, 6, 4)
    resume = Resume(
        checkpoint_id=1,
        page_ids=tuple(save.page_id for save in saves),
        token_ids=tuple(prompt[:cut]),
    )
    start = SlotStart(slot=2, sampling=sampling, resume=resume)
    again = read(engine, 2, prompt, cuts, start)
    assert [again, *decode(engine, 2, NUM_TOKENS, 3)] == expected
    forget(engine, saves, 1)


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("max_draft", [0, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_suspended_sequence_goes_on_as_if_never_stopped(
    models: Models, name: str, max_draft: int, after: int
) -> None:
    engine = models.engine(name)
    prompt = tiny.text(name, 2)[:60]
    start = SlotStart(slot=1, sampling=PENALIZED)
    first = read(engine, 1, prompt, [32], start)
    expected = [first, *decode(engine, 1, NUM_TOKENS, max_draft)]
    known = [read(engine, 1, prompt, [32], start)]
    while len(known) < after + 1:
        step = DecodeStep(slot=1, max_draft=max_draft, spec_min_p=0.0)
        known.extend(engine.run_window(WindowPlan(decodes=(step,))).tokens[0].token_ids)
    saves = pages_for(1, len(prompt) + len(known) - 1)
    suspend = Suspend(slot=1, checkpoint_id=2)
    engine.run_window(WindowPlan(suspends=(suspend,), saves=saves))
    read(engine, 1, tiny.text(name, 1)[:90], [32, 64], SlotStart(slot=1, sampling=GREEDY))
    decode(engine, 1, 5, 4)
    resume = Resume(
        checkpoint_id=2,
        page_ids=tuple(save.page_id for save in saves),
        token_ids=(*prompt, *known),
        num_output=len(known),
    )
    start = SlotStart(slot=3, sampling=PENALIZED, resume=resume)
    step = DecodeStep(slot=3, max_draft=max_draft, spec_min_p=0.0)
    result = engine.run_window(WindowPlan(starts=(start,), decodes=(step,)))
    known.extend(result.tokens[0].token_ids)
    known.extend(decode(engine, 3, NUM_TOKENS, max_draft))
    assert known[: NUM_TOKENS + 1] == expected
    forget(engine, saves, 2)


def test_memory_is_reused_and_counted(models: Models) -> None:
    engine = models.engine("no_ple")
    read(engine, 0, tiny.text("no_ple", 0)[:70], [32, 64], SlotStart(slot=0, sampling=GREEDY))
    held = 0
    for _ in range(3):
        saves = pages_for(0, 70)
        engine.run_window(WindowPlan(suspends=(Suspend(slot=0, checkpoint_id=3),), saves=saves))
        assert held in (0, engine._parked.held_bytes)
        held = engine._parked.held_bytes
        forget(engine, saves, 3)
    assert engine.info.page_bytes > 0
    assert engine.info.checkpoint_bytes % engine.info.page_bytes == 0


def test_host_memory_stays_below_the_limit_whatever_it_is_used_for(models: Models) -> None:
    """Full of pages, then of checkpoints, then of pages: neither keeps what the other needs."""
    config = engine_config(models.checkpoint("no_ple"))
    info = models.engine("no_ple").info
    limit = 3 * info.checkpoint_bytes + info.page_bytes // 2
    engine = load_engine(replace(config, max_parked_bytes=limit))
    read(engine, 0, tiny.text("no_ple", 0)[:70], [32, 64], SlotStart(slot=0, sampling=GREEDY))
    num_pages = limit // info.page_bytes
    pages = tuple(SavePage(slot=0, page_id=i, index=0) for i in range(num_pages))
    checkpoints = tuple(Suspend(slot=0, checkpoint_id=i) for i in range(3))
    for _ in range(2):
        engine.run_window(WindowPlan(saves=pages))
        assert engine._parked.held_bytes == num_pages * info.page_bytes <= limit
        one_more = WindowPlan(saves=(SavePage(slot=0, page_id=999, index=0),))
        with pytest.raises(PlanError, match=f"{num_pages} blocks .* 1 more are needed"):
            engine.run_window(one_more)
        drops = tuple(page.page_id for page in pages)
        engine.run_window(WindowPlan(drop_page_ids=drops, suspends=checkpoints))
        assert engine._parked.held_bytes <= limit
        engine.run_window(WindowPlan(drop_checkpoint_ids=(0, 1, 2)))


class LateLane(CopyLane):
    """Copies only when somebody waits for them: whoever forgets to wait finds, or leaves, the wrong bytes."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Callable[[], None]]] = []
        self.num_late = 0

    def run(self, slot: int, copy: Callable[[], None]) -> None:
        self.waiting.append((slot, copy))

    def wait_all(self) -> None:
        for slot in {slot for slot, _ in self.waiting}:
            self.wait(slot)

    def wait(self, slot: int) -> None:
        last = max((i for i, (of, _) in enumerate(self.waiting) if of == slot), default=-1)
        for _, copy in self.waiting[: last + 1]:
            copy()
            self.num_late += 1
        del self.waiting[: last + 1]


def test_copies_that_are_late_are_waited_for(models: Models) -> None:
    """Two conversations in turn, parked and restored by the scheduler over copies that run beside the windows."""
    engine = load_engine(replace(engine_config(models.checkpoint("no_ple")), num_slots=2))
    solo = Solo(engine)
    config = SchedulerConfig(
        turn_token_id=TURN_ID,
        cache=CacheConfig(min_free_bytes=0, min_shared_tokens=16),
        preempt_wait_s=0.2,
        preempt_run_s=0.2,
        max_preemptions=5,
    )
    rng = Random(4)
    texts = Texts(vocab_size=90, system_tokens=40, user_tokens=12, max_tokens=14, max_prompt=180)
    prompts = [(TURN_ID, *texts.words(rng, 20 + i)) for i in range(3)]
    lane = LateLane()
    engine._parked._lane = lane
    server = Server(engine, config)
    asked: list[Asked] = []
    for _ in range(2):
        turns = [(*prompt, *texts.user_turn(rng)) for prompt in prompts]
        requests = [make_request(prompt_ids=turn, max_tokens=14) for turn in turns]
        batch = [server.ask(request) for request in requests]
        while server.run_window():
            pass
        for one in batch:
            one.read()
        asked += batch
        prompts = [one.request.prompt_ids + tuple(one.token_ids) for one in batch]
    assert server.roster.totals().preemptions > 0
    assert sum(one.usage.cached_tokens for one in asked if one.usage) > 60
    assert lane.num_late > 20
    lane.wait_all()
    for one in asked:
        engine._parked._lane = CopyLane()
        assert tuple(one.token_ids) == solo.tokens(one.request, TURN_ID)


def resumed(checkpoint_id: int, page_ids: tuple[int, ...], num_ids: int) -> WindowPlan:
    """A plan that seats slot 1 from parked state."""
    resume = Resume(
        checkpoint_id=checkpoint_id, page_ids=page_ids, token_ids=(1,) * num_ids, num_output=1
    )
    return WindowPlan(starts=(SlotStart(slot=1, sampling=GREEDY, resume=resume),))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (WindowPlan(drop_page_ids=(99,)), "page 99: no such page"),
        (WindowPlan(drop_checkpoint_ids=(99,)), "checkpoint 99: no such checkpoint"),
        (WindowPlan(suspends=(Suspend(slot=0, checkpoint_id=7),) * 2), "required new ids"),
        (WindowPlan(suspends=(Suspend(slot=0, checkpoint_id=5),)), "required new ids"),
        (WindowPlan(saves=(SavePage(slot=0, page_id=20, index=0),)), "required new ids"),
        (WindowPlan(saves=(SavePage(slot=0, page_id=21, index=2),)), "required to begin below 70"),
        (resumed(5, (20,), 71), "1 pages, required 2 for 70"),
        (resumed(5, (20, 98), 71), r"pages \[98\] are not parked"),
        (resumed(5, (20, 22), 70), "70 token ids resumed, required 71"),
        (resumed(6, (), 1), "checkpoint 6: no such"),
    ],
)
def test_parking_that_contradicts_what_is_there_is_refused(
    parked: TorchEngine, plan: WindowPlan, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        parked.run_window(plan)


@pytest.fixture(scope="module")
def parked(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """An engine whose slot 0 decodes at 70 tokens, with checkpoint 5 and pages 20 and 22 of it."""
    checkpoint = tiny.make_checkpoint(tmp_path_factory.mktemp("parked"), "no_ple")
    engine = load_engine(engine_config(checkpoint))
    read(engine, 0, tiny.text("no_ple", 0)[:70], [32, 64], SlotStart(slot=0, sampling=GREEDY))
    saves = (SavePage(slot=0, page_id=20, index=0), SavePage(slot=0, page_id=22, index=1))
    engine.run_window(WindowPlan(suspends=(Suspend(slot=0, checkpoint_id=5),), saves=saves))
    return engine
