"""The whole scheduler under random submits, cancels, stops, faults and time, one window at a time.

The machine owns the engine's pace: a window runs only when a rule lets it, so every interleaving of callers and
windows is reachable and repeatable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from engine.errors import PlanError
from engine.fake import FakeEngine, FakeFiles, FakeScript, FaultKind
from engine.interface import (
    PAGE_TOKENS,
    EngineInfo,
    Resume,
    SlotFailure,
    WindowPlan,
    WindowResult,
)
from scheduler.config import CacheConfig, SchedulerConfig, SupervisionConfig
from scheduler.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineUnavailable,
    Overloaded,
    SlotFailed,
)
from scheduler.handle import RequestHandle
from scheduler.messages import Failed, Finished, GenerateRequest, TokenEvent, Tokens
from scheduler.prefill import chunk_end
from scheduler.service import Scheduler
from scheduler.stats import Outcome
from scheduler.supervisor import EngineLink, WindowRefused
from tests.factories import FakeClock, expected_ids, make_request

T = TypeVar("T")

TURN_ID = 5
CHUNK_TOKENS = 16
SCRIPT = FakeScript(
    num_slots=2,
    chunk_tokens=CHUNK_TOKENS,
    max_context=256,
    vocab_size=12,
    page_bytes=10,
    checkpoint_bytes=25,
)
CONFIG = SchedulerConfig(
    max_queue=3,
    turn_token_id=TURN_ID,
    max_passes=2,
    cache=CacheConfig(
        max_conversations=3,
        capacity_bytes=200,
        min_free_bytes=0,
        min_shared_tokens=20,
        checkpoint_every_tokens=48,
        disk_bytes=30_000,
    ),
    preempt_wait_s=0.3,
    preempt_run_s=0.2,
    supervision=SupervisionConfig(
        first_backoff_s=0.0, max_backoff_s=0.0, max_deaths=10_000, window_timeout_s=1e6
    ),
)


PARTS = (tuple(range(6)) * 5, (TURN_ID, *(1, 2, 3) * 11), (TURN_ID, 4, 6), (7,) * 50, (1, 2))
"""Prompts are made of these, so that many begin alike."""
PROMPTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(
    lambda parts: sum(parts, ())[:200]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """How a slot's prompt was read so far."""

    ids: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()

    def before(self, end: int) -> Read:
        """The part that decides what the cells before `end` are."""
        last = next((cut for cut in self.cuts if cut >= end), end)
        cuts = tuple(cut for cut in self.cuts if cut <= last)
        return Read(ids=self.ids[:last], cuts=cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filed:
    """How the pages and checkpoints of a file were read."""

    pages: tuple[Read, ...]
    checkpoints: tuple[Read, ...]


@dataclass(slots=True, kw_only=True)
class Pace:
    """How many windows may run, and what befalls the next one."""

    permits: asyncio.Semaphore
    num_groups: int = 1
    """See FakeScript: with two, tokens come a window late."""
    fault: FaultKind | None = None
    failing_slot: int = 0
    held_ids: Callable[[], tuple[frozenset[int], frozenset[int]]] | None = None
    """What the scheduler believes the engine has parked."""
    files: FakeFiles = field(default_factory=FakeFiles)
    """The directory of conversation files, which outlives engines."""
    filed: dict[str, Filed] = field(default_factory=dict["str", "Filed"])
    """How what is in them was read."""


class SteppedLink:
    """EngineLink whose windows wait for the machine's permission."""

    def __init__(self, engine: FakeEngine, pace: Pace) -> None:
        self._engine = engine
        self._pace = pace
        self._dead = asyncio.Event()
        self._slots: dict[int, Read] = {}
        self._pages: dict[int, Read] = {}
        self._checkpoints: dict[int, Read] = {}

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def run_window(self, plan: WindowPlan) -> WindowResult:
        fault = None
        if plan.chunks or plan.decodes:
            await self._pace.permits.acquire()
            fault, self._pace.fault = self._pace.fault, None
        if fault is FaultKind.PLAN:
            raise WindowRefused("as told")
        if fault is FaultKind.DIE:
            raise EngineDead("as told")
        try:
            result = self._engine.run_window(plan)
        except PlanError as error:
            raise AssertionError(f"the scheduler made a bad plan: {error}") from error
        assert self._pace.held_ids is not None
        assert self._engine.parked_ids() == self._pace.held_ids()
        self._check_cuts(plan)
        return self._break_slot(result) if fault is FaultKind.SLOT else result

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return "killed"

    def kill(self) -> None:
        self._dead.set()

    async def close(self, timeout_s: float) -> None:
        self.kill()

    def _check_cuts(self, plan: WindowPlan) -> None:
        """Each prompt is cut by the rule on its tokens, whatever the load was and whatever was read for another
        request: also every page and checkpoint that it went on from (product.md D3)."""
        for suspend in plan.suspends:
            self._checkpoints[suspend.checkpoint_id] = self._slots[suspend.slot]
        for save in plan.saves:
            self._pages[save.page_id] = self._slots[save.slot]
        for write in plan.writes:
            self._pace.filed[write.file_id] = Filed(
                pages=tuple(self._pages[i] for i in write.page_ids),
                checkpoints=tuple(self._checkpoints[i] for i in write.checkpoint_ids),
            )
        for order in plan.reads:
            filed = self._pace.filed[order.file_id]
            self._pages |= zip(order.page_ids, filed.pages, strict=False)
            self._checkpoints |= zip(order.checkpoint_ids, filed.checkpoints, strict=False)
        for start in plan.starts:
            self._slots[start.slot] = Read()
            if start.resume is not None:
                self._slots[start.slot] = self._resumed(start.resume)
        for chunk in plan.chunks:
            ids = self._slots[chunk.slot].ids + chunk.token_ids
            read = Read(ids=ids, cuts=(*self._slots[chunk.slot].cuts, len(ids)))
            self._slots[chunk.slot] = read
            if chunk.checkpoint_id is not None:
                self._checkpoints[chunk.checkpoint_id] = read
            if chunk.is_last:
                assert read.cuts == whole_cuts(ids)

    def _resumed(self, resume: Resume) -> Read:
        read = self._checkpoints[resume.checkpoint_id]
        for index, page_id in enumerate(resume.page_ids):
            end = min((index + 1) * PAGE_TOKENS, len(read.ids))
            assert self._pages[page_id].before(end) == read.before(end)
        return read

    def _break_slot(self, result: WindowResult) -> WindowResult:
        """As if the rows of one slot with tokens had been unusable."""
        if not result.tokens:
            return result
        broken = result.tokens[self._pace.failing_slot % len(result.tokens)]
        kept = tuple(tokens for tokens in result.tokens if tokens is not broken)
        failure = SlotFailure(slot=broken.slot, message="as told")
        return replace(result, tokens=kept, failures=(failure,))


def whole_cuts(prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    ends: list[int] = [0]
    while ends[-1] < len(prompt_ids):
        end = chunk_end(prompt_ids, ends[-1], chunk_tokens=CHUNK_TOKENS, turn_token_id=TURN_ID)
        ends.append(end)
    return tuple(ends[1:])


@dataclass(slots=True, kw_only=True, eq=False)
class Caller:
    """One request as its caller saw it."""

    handle: RequestHandle
    reader: asyncio.Task[None]
    events: list[TokenEvent]
    cancelled: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        tokens = [event for event in self.events if isinstance(event, Tokens)]
        return tuple(token_id for event in tokens for token_id in event.token_ids)

    @property
    def endings(self) -> list[Finished | Failed]:
        return [event for event in self.events if isinstance(event, Finished | Failed)]


async def read(handle: RequestHandle, events: list[TokenEvent]) -> None:
    async for event in handle:
        events.append(event)  # noqa: PERF401 (the machine looks while this waits)


async def launch(pace: Pace) -> EngineLink:
    script = replace(SCRIPT, num_groups=pace.num_groups)
    return SteppedLink(FakeEngine(script, files=pace.files), pace)


class SchedulerMachine(RuleBasedStateMachine):
    callers = Bundle("callers")

    def __init__(self) -> None:
        super().__init__()
        self.events_loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.everyone: list[Caller] = []
        self.stopped = False

    @initialize(num_groups=st.integers(1, 2))
    def start(self, num_groups: int) -> None:
        self.pace = Pace(permits=asyncio.Semaphore(0), num_groups=num_groups)
        self.scheduler = Scheduler(CONFIG, partial(launch, self.pace), clock=self.clock)
        self.run(self.scheduler.start())
        roster = self.scheduler._roster
        assert roster is not None
        self.pace.held_ids = roster._parking.held_ids

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.events_loop.run_until_complete(work)

    def settle(self) -> None:
        """Let every task come to rest."""

        async def breathe() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.run(breathe())

    @rule(
        target=callers,
        previous=st.none() | callers,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 50),
        seed=st.integers(0, 3),
        stops=st.lists(st.integers(0, 11), max_size=2).map(tuple),
        owner=st.sampled_from(["", "a", "b"]),
        priority=st.integers(0, 1),
        max_draft=st.none() | st.integers(0, 4),
        deadline_s=st.none() | st.floats(2.0, 9.0),
    )
    def submit(
        self,
        previous: Caller | None,
        prompt: tuple[int, ...],
        max_tokens: int,
        seed: int,
        stops: tuple[int, ...],
        owner: str,
        priority: int,
        max_draft: int | None,
        deadline_s: float | None,
    ) -> object:
        """A new conversation, or the next turn of one (or the same again)."""
        if previous is not None:
            said = previous.handle.request.prompt_ids + previous.token_ids
            prompt = (*said, *prompt)[: SCRIPT.max_context - max_tokens]
            owner = previous.handle.request.owner
        request = make_request(
            prompt_ids=prompt,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=stops,
            owner=owner,
            priority=priority,
            max_draft=max_draft,
            deadline_s=deadline_s,
        )
        return self.submit_request(request)

    def submit_request(self, request: GenerateRequest) -> object:
        try:
            handle = self.scheduler.submit(request)
        except Overloaded:
            assert self.scheduler.stats().queued >= CONFIG.max_queue
            return multiple()
        except Draining:
            assert self.stopped
            return multiple()
        except EngineUnavailable:
            assert not self.scheduler.ready
            return multiple()
        events: list[TokenEvent] = []
        caller = Caller(
            handle=handle, reader=self.events_loop.create_task(read(handle, events)), events=events
        )
        self.everyone.append(caller)
        self.settle()
        return caller

    @rule(caller=callers)
    def cancel(self, caller: Caller) -> None:
        was_live = not caller.handle.ended
        caller.handle.cancel()
        caller.cancelled = caller.cancelled or was_live
        num_events = len(caller.events)
        self.settle()
        assert len(caller.events) == num_events or not was_live

    @precondition(lambda self: not self.stopped)
    @rule(num_windows=st.integers(1, 12), window_s=st.sampled_from([0.0, 0.1]))
    def run_windows(self, num_windows: int, window_s: float) -> None:
        for _ in range(num_windows):
            self.clock.advance(window_s)
            self.allow_one_window()

    @precondition(lambda self: not self.stopped)
    @rule()
    def run_to_rest(self) -> None:
        for _ in range(400):
            self.allow_one_window()

    @precondition(lambda self: not self.stopped)
    @rule(
        kind=st.sampled_from([None, FaultKind.DIE, FaultKind.PLAN, FaultKind.SLOT]),
        slot=st.integers(0, 1),
        luck=st.integers(0, 3),
    )
    def fail_one_window(self, kind: FaultKind | None, slot: int, luck: int) -> None:
        if luck or not self.has_work:
            return
        self.pace.fault, self.pace.failing_slot = kind, slot
        self.allow_one_window()
        assert self.pace.fault is None

    @rule(number=st.integers(0, 20), is_full=st.sampled_from([False, False, False, True]))
    def disturb_files(self, number: int, is_full: bool) -> None:
        """One file is damaged, if there are so many; the disk is full, or not any more."""
        self.pace.files.is_full = is_full
        for file in list(self.pace.files.files.values())[number : number + 1]:
            file.is_damaged = True

    @precondition(lambda self: not self.stopped)
    @rule(target=callers, caller=callers)
    def come_back_from_disk(self, caller: Caller) -> object:
        """The same again, when everything is at rest and memory has forgotten it."""
        self.run_to_rest()
        roster = self.scheduler._roster
        assert roster is not None
        roster._parking._store.evict_all()
        request = caller.handle.request
        return self.submit_request(replace(request, deadline_s=None))

    @rule(seconds=st.floats(0.1, 2.0))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: not self.stopped and len(self.everyone) > 12)
    @rule()
    def stop(self) -> None:
        self.stopped = True
        self.run(self.scheduler.stop(0.0))
        self.settle()
        assert all(caller.reader.done() for caller in self.everyone)

    @property
    def has_work(self) -> bool:
        """A window waits for its permit."""
        return any(view.request_id is not None for view in self.scheduler.stats().slots)

    def allow_one_window(self) -> None:
        if self.has_work:
            self.pace.permits.release()
            self.settle()
            assert self.pace.permits.locked(), "the window did not run"

    @invariant()
    def books_balance(self) -> None:
        roster = self.scheduler._roster
        assert roster is not None
        roster.check_invariants()
        stats = self.scheduler.stats()
        outcomes = dict(stats.totals.outcomes)
        assert stats.totals.submitted == len(self.everyone)
        assert outcomes[Outcome.CANCELLED] == sum(caller.cancelled for caller in self.everyone)
        assert stats.queued <= CONFIG.max_queue + SCRIPT.num_slots
        seated = [view.request_id for view in stats.slots if view.request_id is not None]
        assert len(set(seated)) == len(seated)
        published = sum(len(caller.token_ids) for caller in self.everyone)
        assert stats.totals.completion_tokens == published

    @invariant()
    def callers_are_told_the_truth(self) -> None:
        for caller in self.everyone:
            expected = expected_ids(SCRIPT, caller.handle.request)
            assert caller.token_ids == expected[: len(caller.token_ids)]
            assert len(caller.endings) <= 1
            if caller.reader.done():
                caller.reader.result()
                self.check_ending(caller, expected)
            else:
                assert not caller.handle.ended and not caller.endings

    def check_ending(self, caller: Caller, expected: tuple[int, ...]) -> None:
        if caller.cancelled:
            assert caller.endings == []
            return
        (ending,) = caller.endings
        assert caller.events[-1] is ending
        match ending:
            case Finished(usage=usage):
                assert caller.token_ids == expected
                assert usage.completion_tokens == len(expected)
                assert usage.prompt_tokens == len(caller.handle.request.prompt_ids)
                assert 0 <= usage.cached_tokens < usage.prompt_tokens
            case Failed(error=error):
                assert isinstance(error, EngineDead | SlotFailed | DeadlineExceeded | Draining)

    def teardown(self) -> None:
        """Left alone, everyone who is still there gets everything."""
        if not hasattr(self, "scheduler"):
            self.events_loop.close()
            return
        for _ in range(2000):
            if self.stopped or not self.has_work:
                break
            self.allow_one_window()
        self.callers_are_told_the_truth()
        self.books_balance()
        assert all(caller.reader.done() for caller in self.everyone)
        stats = self.scheduler.stats()
        assert stats.queued == 0
        self.check_nothing_leaked()
        assert sum(count for _, count in stats.totals.outcomes) == stats.totals.submitted
        self.run(self.scheduler.stop(0.0))
        self.settle()
        assert asyncio.all_tasks(self.events_loop) == set()
        self.events_loop.close()

    def check_nothing_leaked(self) -> None:
        """Without requests and without conversations, nothing is held."""
        roster = self.scheduler._roster
        assert roster is not None
        disk = roster._parking._disk
        assert disk is not None
        if self.stopped and disk.is_busy:
            return  # the engine was closed before it had done its file work
        store = roster._parking._store
        store.evict_all()
        assert store.num_bytes == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
pytestmark = pytest.mark.timeout(90)
