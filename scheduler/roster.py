"""Roster: every live sequence with its handle, waiting or seated, and the bookkeeping around one window.

Synchronous; its methods are called from the event loop's thread between two awaits of the loop, which is why cancel
and submit may come at any time and the slots still have one owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from functools import partial
from typing import TYPE_CHECKING

from engine.interface import WindowPlan
from scheduler.admission import PreemptionRules, ReturnLine, WaitingQueue, pick_preempted
from scheduler.errors import DeadlineExceeded, EngineDead, Overloaded
from scheduler.handle import RequestHandle
from scheduler.messages import Failed, Finished, GenerateRequest, Tokens
from scheduler.parking import Parking
from scheduler.prefill import ReadShare
from scheduler.sequence import Phase, SequenceState
from scheduler.slots import Slot, SlotTable
from scheduler.stats import Counters, Outcome, SlotView, Totals, outcome_of
from scheduler.turn import NextTurn
from scheduler.window import (
    Flight,
    Pace,
    WindowRules,
    apply_result,
    broken_slots,
    measured,
    plan_window,
)
from scheduler.words import counted

if TYPE_CHECKING:
    from cache.disk import DiskStats
    from cache.store import StoreStats
    from engine.interface import EngineInfo, KeptFile, WindowResult
    from scheduler.config import SchedulerConfig


class Roster:
    """Who waits, who sits where, and what each caller has been told."""

    def __init__(
        self, config: SchedulerConfig, info: EngineInfo, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._info = info
        self._clock = clock
        self._rules = WindowRules(
            chunk_tokens=info.chunk_tokens,
            turn_token_id=config.turn_token_id,
            max_passes=config.max_passes,
        )
        self._preemption = PreemptionRules(
            wait_s=config.preempt_wait_s,
            run_s=config.preempt_run_s,
            max_times=config.max_preemptions,
        )
        self._parking = Parking(
            config.cache,
            info,
            turn_token_id=config.turn_token_id,
            identities=dict(config.owner_identities),
        )
        self._generation: int | None = None
        self._pace = Pace(share=ReadShare(decode_share=config.decode_share))
        self._waiting = WaitingQueue(config.max_queue)
        self._table = SlotTable(info.num_slots)
        self._flight = Flight()
        self._handles: dict[int, RequestHandle] = {}
        self._line = ReturnLine(info.num_slots)
        self._counters = Counters()
        self._turn = NextTurn()
        self._next_deadline_s = math.inf
        """Nobody's deadline passes before it."""

    def admit(self, request: GenerateRequest, leader: RequestHandle | None = None) -> RequestHandle:
        """Queue a request. Raises Overloaded.

        leader: of a request with the same prompt and owner, which is to be read once for both.
        """
        now = self._clock()
        if not self._waiting.has_room(self._table.num_free):
            self._counters.rejected += 1
            seated_s = [now - slot.sequence.seated_at_s for slot in self._table]
            raise Overloaded(
                f"the queue has {counted(len(self._waiting), 'request')} already",
                retry_after_s=self._line.retry_after_s(now, seated_s),
            )
        info, deadline_s = self._info, request.deadline_s
        asked_draft, asked_min_p = request.max_draft, request.spec_min_p
        sequence = SequenceState(
            request=request,
            arrival=self._counters.submitted,
            deadline_at_s=None if deadline_s is None else now + deadline_s,
            max_draft=info.max_draft if asked_draft is None else min(asked_draft, info.max_draft),
            spec_min_p=self._config.spec_min_p if asked_min_p is None else asked_min_p,
            leader=None if leader is None else self._leader(leader, request),
            waiting_since_s=now,
        )
        if sequence.leader is not None:
            sequence.leader.has_followers = True
        if sequence.deadline_at_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, sequence.deadline_at_s)
        handle = RequestHandle(
            request, submitted_s=now, on_cancel=partial(self._cancel, sequence), turn=self._turn
        )
        self._counters.submitted += 1
        self._handles[sequence.arrival] = handle
        self._waiting.add(sequence)
        self._parking.fetch(sequence)
        return handle

    def give_up_overdue(self) -> None:
        """Fail everyone whose deadline has passed."""
        now = self._clock()
        if now < self._next_deadline_s:
            return
        overdue = self._waiting.take_overdue(now)
        for sequence in overdue:
            self._parking.forget(sequence)
        for slot in self._table.settled():
            if slot.sequence.is_overdue(now):
                overdue += (self._table.release(slot.index),)
                self._parking.left(slot)
        live = (*self._waiting, *(slot.sequence for slot in self._table))
        deadlines_s = [s.deadline_at_s for s in live if s.deadline_at_s is not None]
        self._next_deadline_s = min(deadlines_s, default=math.inf)
        for sequence in overdue:
            limit_s = sequence.request.deadline_s
            error = DeadlineExceeded(f"not finished within its deadline of {limit_s} s")
            self._end(sequence, Failed(error=error), self._clock())

    def seat_waiting(self) -> None:
        """Give free seats to those who are next, then the seats of those who have to give way."""
        now = self._clock()
        while (next_up := self._next_up()) is not None:
            if self._table.num_free:
                self._seat(next_up, now)
                continue
            slot = pick_preempted(next_up, self._table.settled(), now, self._preemption)
            if slot is None:
                return
            slot.sequence.num_suspensions += 1
            if not self._parking.suspend(slot):
                continue
            self._counters.preemptions += 1
            suspended = self._table.suspend(slot.index)
            self._seat(next_up, now)
            suspended.waiting_since_s = now
            self._waiting.add(suspended)

    def plan(self) -> WindowPlan | None:
        """The next window, None when there is nothing to do."""
        plan = self._parking.complete(
            plan_window(self._table, self._rules, self._pace), self._table
        )
        return WindowPlan() if plan is None and self._table.in_flight else plan

    def apply(
        self,
        plan: WindowPlan,
        result: WindowResult,
        seconds: float,
        gap_s: float | None = None,
    ) -> None:
        """Take in a window's result and tell the callers.

        seconds: from plan to result; gap_s: from the last result to this plan, if there was no pause in between.
        """
        self._parking.files_done(result.files)
        self._table.in_flight = frozenset(result.in_flight)
        plan = self._flight.landed(plan, result)
        if not plan.chunks and not plan.decodes and not plan.starts:
            return
        self._counters.count_window(plan, result, seconds)
        self._pace = measured(self._table, self._pace, plan, result, seconds, gap_s)
        for start in plan.starts:
            self._parking.started(self._table[start.slot])
        seated, num_free = tuple(self._table), self._table.num_free
        events = apply_result(self._table, plan, result)
        if self._table.num_free > num_free:
            ended = [slot for slot in seated if slot.sequence.phase is Phase.ENDED]
            self._park_ended(ended, broken_slots(plan, result).keys())
        if plan.chunks:
            self._share_prompts({chunk.slot for chunk in plan.chunks if chunk.is_last})
        now = self._clock()
        handles, num_tokens = self._handles, 0
        for sequence, event in events:
            if not isinstance(event, Tokens):
                self._end(sequence, event, now)
            elif (handle := handles.get(sequence.arrival)) is not None:
                handle.publish(event, now)
                num_tokens += len(event.token_ids)
        self._counters.completion_tokens += num_tokens

    def fail_all(self, error: Exception) -> None:
        """Nobody here can go on."""
        self._forget_flight()
        seated = tuple(self._table.release(slot.index) for slot in tuple(self._table))
        for sequence in (*seated, *self._waiting.take_all()):
            self._parking.forget(sequence)
            self._end(sequence, Failed(error=error), self._clock())

    def engine_lost(self, error: Exception) -> None:
        """The engine is beyond use: nobody can go on, and there is nothing left to order of it."""
        self.fail_all(error)
        self._parking.clear(())

    def fail_seated(self, error: Exception) -> None:
        """Those who have seats cannot go on."""
        self._forget_flight()
        for slot in tuple(self._table):
            sequence = self._table.release(slot.index)
            self._parking.forget(sequence)
            self._end(sequence, Failed(error=error), self._clock())

    def window_refused(self, error: Exception) -> None:
        """The last plan was not carried out: nobody whose state was part of it can go on."""
        self._fail_waiting([s for s in self._waiting if self._parking.was_refused(s)], error)
        self.fail_seated(error)
        self._parking.refused()

    def follow_engine(self, generation: int, files: tuple[KeptFile, ...] = ()) -> None:
        """Forget what was in an engine that is gone; files: what this one has found on disk."""
        if self._generation not in (None, generation):
            error = EngineDead("the engine that held the sequence is gone")
            self.fail_seated(error)
            self._fail_waiting([s for s in self._waiting if s.output_ids], error)
            self._parking.clear(files)
            for sequence in self._waiting:
                self._parking.fetch(sequence)
        self._generation = generation

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def totals(self) -> Totals:
        return self._counters.snapshot()

    def parking_stats(self) -> StoreStats:
        return self._parking.stats()

    def disk_stats(self) -> DiskStats | None:
        return self._parking.disk_stats()

    def slot_views(self) -> tuple[SlotView, ...]:
        taken = {slot.index: slot.sequence for slot in self._table}
        return tuple(_view(index, taken.get(index)) for index in range(len(self._table)))

    def check_invariants(self) -> None:
        """Raises AssertionError when queue, seats, handles and counts contradict each other."""
        self._table.check_invariants()
        seated = {slot.sequence.arrival for slot in self._table}
        suspended = {sequence.arrival for sequence in self._waiting if sequence.output_ids}
        self._parking.check_integrity(seated | suspended)
        live = {slot.sequence.arrival for slot in self._table if not slot.sequence.cancelled}
        waiting = self._waiting.arrivals()
        assert not live & waiting, "both seated and waiting"
        assert live | waiting == self._handles.keys(), "a live sequence without a handle"
        assert not any(handle.ended for handle in self._handles.values()), "an ended live sequence"
        num_ended = sum(self._counters.outcomes.values())
        assert self._counters.submitted == num_ended + len(self._handles), "outcomes do not add up"

    @property
    def has_flight(self) -> bool:
        """Whether the engine still has work of earlier windows."""
        return bool(self._table.in_flight)

    def _forget_flight(self) -> None:
        self._table.in_flight = frozenset()
        self._flight.clear()

    def _leader(self, handle: RequestHandle, request: GenerateRequest) -> SequenceState | None:
        """The handle's sequence, if waiting for it can save anything."""
        everyone = (*self._waiting, *(slot.sequence for slot in self._table))
        leader = next((s for s in everyone if self._handles.get(s.arrival) is handle), None)
        if leader is None or not self._parking.can_share(request.prompt_ids):
            return None
        assert leader.request.prompt_ids == request.prompt_ids
        assert leader.request.owner == request.owner
        return leader

    def _share_prompts(self, read: Set[int]) -> None:
        """Park the prompts that were just read to the end in these slots, if others wait for them."""
        for slot in self._table.in_phase(Phase.DECODING):
            if slot.index in read and slot.sequence.has_followers:
                self._parking.share(slot)

    def _next_up(self) -> SequenceState | None:
        if not self._waiting:
            return None
        return self._waiting.next_up([slot.sequence for slot in self._table])

    def _seat(self, sequence: SequenceState, now_s: float) -> None:
        self._waiting.take(sequence)
        self._table.seat(sequence)
        sequence.seated_at_s = now_s
        self._parking.seated(sequence)
        handle = self._handles[sequence.arrival]
        if handle.started_s is None:
            handle.started_s = now_s

    def _park_ended(self, slots: list[Slot], broken: Set[int]) -> None:
        """Park what the slots' sequences, which are over, have read."""
        for slot in slots:
            if slot.index in broken:
                self._parking.forget(slot.sequence)
            else:
                self._parking.left(slot)

    def _fail_waiting(self, sequences: list[SequenceState], error: Exception) -> None:
        for sequence in sequences:
            self._waiting.remove(sequence)
            self._parking.forget(sequence)
            self._end(sequence, Failed(error=error), self._clock())

    def _cancel(self, sequence: SequenceState) -> None:
        """The caller left: out of the queue now, out of the seat when its window returns."""
        sequence.cancelled = True
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
            self._parking.forget(sequence)
        handle = self._handles.pop(sequence.arrival)
        handle.ended_s = self._clock()
        handle.usage = sequence.usage()
        self._counters.outcomes[Outcome.CANCELLED] += 1

    def _end(self, sequence: SequenceState, event: Finished | Failed, now_s: float) -> None:
        """Tell the caller, unless it has left."""
        handle = self._handles.pop(sequence.arrival, None)
        if handle is None:
            return
        handle.publish(event, now_s)
        handle.usage = sequence.usage()
        self._counters.outcomes[outcome_of(event)] += 1
        if handle.started_s is not None:
            self._line.seat_took(now_s - handle.started_s)


def _view(index: int, sequence: SequenceState | None) -> SlotView:
    if sequence is None:
        return SlotView(
            index=index,
            request_id=None,
            phase=None,
            prompt_tokens=0,
            read_tokens=0,
            output_tokens=0,
        )
    return SlotView(
        index=index,
        request_id=sequence.request.request_id,
        phase=sequence.phase,
        prompt_tokens=sequence.num_prompt_tokens,
        read_tokens=sequence.num_read_tokens,
        output_tokens=len(sequence.output_ids),
    )
