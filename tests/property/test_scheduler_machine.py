"""The whole scheduler under random submits, cancels, stops, faults and time, one window at a time.

The machine owns the engine's pace: a window runs only when a rule lets it, so every interleaving of callers and
windows is reachable and repeatable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

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
from engine.fake import FakeEngine, FakeScript, FaultKind
from engine.interface import EngineInfo, SlotFailure, WindowPlan, WindowResult
from scheduler.config import SchedulerConfig, SupervisionConfig
from scheduler.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineUnavailable,
    Overloaded,
    SlotFailed,
)
from scheduler.handle import RequestHandle
from scheduler.messages import Failed, Finished, TokenEvent, Tokens
from scheduler.prefill import chunk_end
from scheduler.service import Scheduler
from scheduler.stats import Outcome
from scheduler.supervisor import EngineLink, WindowRefused
from tests.factories import FakeClock, expected_ids, make_request

T = TypeVar("T")

TURN_ID = 5
SCRIPT = FakeScript(num_slots=3, chunk_tokens=4, max_context=64, vocab_size=12)
CONFIG = SchedulerConfig(
    max_queue=3,
    turn_token_id=TURN_ID,
    max_passes=2,
    supervision=SupervisionConfig(
        first_backoff_s=0.0, max_backoff_s=0.0, max_deaths=10_000, window_timeout_s=1e6
    ),
)


@dataclass(slots=True, kw_only=True)
class Pace:
    """How many windows may run, and what befalls the next one."""

    permits: asyncio.Semaphore
    fault: FaultKind | None = None
    failing_slot: int = 0
    cuts_by_slot: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    prompt_by_slot: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


class SteppedLink:
    """EngineLink whose windows wait for the machine's permission."""

    def __init__(self, engine: FakeEngine, pace: Pace) -> None:
        self._engine = engine
        self._pace = pace
        self._dead = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def run_window(self, plan: WindowPlan) -> WindowResult:
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
        """Each prompt is cut by the rule on its tokens, whatever the load was (product.md D3)."""
        cuts, prompts = self._pace.cuts_by_slot, self._pace.prompt_by_slot
        for chunk in plan.chunks:
            if chunk.start == 0:
                cuts[chunk.slot], prompts[chunk.slot] = [], ()
            prompts[chunk.slot] += chunk.token_ids
            cuts[chunk.slot].append(len(prompts[chunk.slot]))
            if chunk.is_last:
                assert cuts[chunk.slot] == whole_cuts(prompts[chunk.slot])

    def _break_slot(self, result: WindowResult) -> WindowResult:
        """As if the rows of one slot with tokens had been unusable."""
        if not result.tokens:
            return result
        broken = result.tokens[self._pace.failing_slot % len(result.tokens)]
        kept = tuple(tokens for tokens in result.tokens if tokens is not broken)
        failure = SlotFailure(slot=broken.slot, message="as told")
        return replace(result, tokens=kept, failures=(failure,))


def whole_cuts(prompt_ids: tuple[int, ...]) -> list[int]:
    ends: list[int] = [0]
    while ends[-1] < len(prompt_ids):
        end = chunk_end(prompt_ids, ends[-1], chunk_tokens=4, turn_token_id=TURN_ID)
        ends.append(end)
    return ends[1:]


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
    return SteppedLink(FakeEngine(SCRIPT), pace)


class SchedulerMachine(RuleBasedStateMachine):
    callers = Bundle("callers")

    def __init__(self) -> None:
        super().__init__()
        self.events_loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.everyone: list[Caller] = []
        self.stopped = False

    @initialize()
    def start(self) -> None:
        self.pace = Pace(permits=asyncio.Semaphore(0))
        self.scheduler = Scheduler(CONFIG, partial(launch, self.pace), clock=self.clock)
        self.run(self.scheduler.start())

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.events_loop.run_until_complete(work)

    def settle(self) -> None:
        """Let every task come to rest."""

        async def breathe() -> None:
            for _ in range(30):
                await asyncio.sleep(0)

        self.run(breathe())

    @rule(
        target=callers,
        prompt=st.lists(st.integers(1, 7), min_size=1, max_size=30).map(tuple),
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 3),
        stops=st.lists(st.integers(0, 11), max_size=2).map(tuple),
        owner=st.sampled_from(["", "a", "b"]),
        priority=st.integers(0, 1),
        max_draft=st.none() | st.integers(0, 4),
        deadline_s=st.none() | st.floats(0.5, 5.0),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        seed: int,
        stops: tuple[int, ...],
        owner: str,
        priority: int,
        max_draft: int | None,
        deadline_s: float | None,
    ) -> object:
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
    @rule(num_windows=st.integers(1, 12))
    def run_windows(self, num_windows: int) -> None:
        for _ in range(num_windows):
            self.allow_one_window()

    @precondition(lambda self: not self.stopped)
    @rule(
        kind=st.sampled_from([FaultKind.DIE, FaultKind.PLAN, FaultKind.SLOT]),
        slot=st.integers(0, 2),
    )
    def fail_one_window(self, kind: FaultKind, slot: int) -> None:
        if not self.has_work:
            return
        self.pace.fault, self.pace.failing_slot = kind, slot
        self.allow_one_window()
        assert self.pace.fault is None

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
        assert sum(count for _, count in stats.totals.outcomes) == stats.totals.submitted
        self.run(self.scheduler.stop(0.0))
        self.settle()
        assert asyncio.all_tasks(self.events_loop) == set()
        self.events_loop.close()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
