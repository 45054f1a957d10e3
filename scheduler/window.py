"""One window's plan from the slots, and the slots' progress from its result. No clock, no engine, no callers.

The loop owns the slots; `plan_window` only reads them, `apply_result` advances them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.interface import (
    DecodeStep,
    PrefillChunk,
    SlotStart,
    SlotTokens,
    WindowPlan,
    WindowResult,
)
from scheduler.draft import (
    EXPLORE_EVERY,
    NO_DRAFTS,
    Acceptance,
    DraftBid,
    WindowCosts,
    choose_depths,
)
from scheduler.errors import GrammarFailed, SlotFailed
from scheduler.messages import Failed, Finished, FinishReason, TokenEvent, Tokens
from scheduler.prefill import PromptBid, ReadShare, chunk_end, pick_chunks
from scheduler.sequence import Phase, SequenceState

if TYPE_CHECKING:
    from scheduler.slots import Slot, SlotTable

_NO_TOKENS = "the engine gave no tokens for this sequence"
_DECODING = Phase.DECODING
"""Looking up a member of an enum takes as long as all else that a token costs here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRules:
    """Constants of planning."""

    chunk_tokens: int
    turn_token_id: int | None
    max_passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What was measured so far, for choosing how much to read and how deep to draft."""

    share: ReadShare
    costs: WindowCosts = field(default_factory=WindowCosts)
    everyone: Acceptance = field(default_factory=Acceptance)
    """How drafts of all sequences went."""
    num_windows: int = 0
    """With decode steps."""

    @property
    def explores(self) -> bool:
        """Whether the next window drafts as deep as it may."""
        return self.num_windows % EXPLORE_EVERY == 0

    @property
    def explores_next(self) -> bool:
        """Whether the window after that does."""
        return (self.num_windows + 1) % EXPLORE_EVERY == 0


SequenceEvent = tuple[SequenceState, TokenEvent]
"""What to tell one sequence's caller."""


def plan_window(table: SlotTable, rules: WindowRules, pace: Pace) -> WindowPlan | None:
    """The next window's work, or None when no seat has any."""
    settled = table.settled()
    decoding = tuple([slot for slot in settled if slot.sequence.phase is _DECODING])
    reading: tuple[Slot, ...] = ()
    if len(decoding) < len(settled):
        reading = tuple([slot for slot in settled if slot.sequence.phase is Phase.READING])
    chunks: tuple[PrefillChunk, ...] = ()
    if reading and pace.share.may_read(has_decodes=bool(decoding)):
        chunks = _plan_chunks(reading, rules)
    decodes = _plan_decodes(decoding, pace)
    if not chunks and not decodes:
        return None
    new = {slot.index: slot.sequence for slot in table if not slot.sequence.is_started}
    working = (work.slot for work in (*chunks, *decodes)) if new else ()
    starts = tuple(_start(index, new[index]) for index in working if index in new)
    return WindowPlan(starts=starts, chunks=chunks, decodes=decodes)


def _start(index: int, sequence: SequenceState) -> SlotStart:
    return SlotStart(
        slot=index,
        sampling=sequence.request.sampling,
        resume=sequence.resume,
        uses_drafts=sequence.max_draft > 0,
    )


def _plan_chunks(reading: tuple[Slot, ...], rules: WindowRules) -> tuple[PrefillChunk, ...]:
    next_chunks = {slot.index: _next_chunk(slot, rules) for slot in reading}
    bids = (
        PromptBid(
            slot=slot.index,
            next_tokens=len(next_chunks[slot.index].token_ids),
            unread_tokens=slot.sequence.num_unread_tokens,
            priority=slot.sequence.request.priority,
            num_passes=slot.sequence.num_passes,
            arrival=slot.sequence.arrival,
        )
        for slot in reading
    )
    picked = pick_chunks(bids, budget_tokens=rules.chunk_tokens, max_passes=rules.max_passes)
    return tuple(next_chunks[index] for index in picked)


def _next_chunk(slot: Slot, rules: WindowRules) -> PrefillChunk:
    prompt_ids = slot.sequence.request.prompt_ids
    start = slot.sequence.num_read_tokens
    end = chunk_end(
        prompt_ids, start, chunk_tokens=rules.chunk_tokens, turn_token_id=rules.turn_token_id
    )
    return PrefillChunk(
        slot=slot.index,
        start=start,
        token_ids=prompt_ids[start:end],
        is_last=end == len(prompt_ids),
    )


def _plan_decodes(decoding: tuple[Slot, ...], pace: Pace) -> tuple[DecodeStep, ...]:
    if not any([slot.sequence.max_draft for slot in decoding]):  # noqa: C419 - a generator costs more
        return tuple([slot.plain_step for slot in decoding])
    bids = tuple(
        [
            _draft_bid(slot.sequence, pace) if slot.sequence.max_draft else NO_DRAFTS
            for slot in decoding
        ]
    )
    best = choose_depths(bids, pace.costs)
    depths = tuple([bid.cap for bid in bids]) if pace.explores else best
    return tuple(
        [
            DecodeStep(
                slot=slot.index,
                max_draft=depth,
                spec_min_p=slot.sequence.spec_min_p,
                next_draft=_next_depth(slot.sequence, pace, likely),
            )
            for slot, depth, likely in zip(decoding, depths, best, strict=True)
        ]
    )


def _draft_bid(sequence: SequenceState, pace: Pace) -> DraftBid:
    return DraftBid(
        cap=sequence.draft_cap,
        survival=sequence.acceptance.survival(pace.everyone),
        reach=sequence.acceptance.reach(pace.everyone),
    )


def _next_depth(sequence: SequenceState, pace: Pace, likely: int) -> int:
    """How deep the sequence will likely draft when this window has given it a token at least."""
    cap = max(0, min(sequence.max_draft, sequence.num_wanted_tokens - 2))
    return cap if pace.explores_next else min(likely, cap)


def apply_result(
    table: SlotTable, plan: WindowPlan, result: WindowResult
) -> tuple[SequenceEvent, ...]:
    """Advance the slots by a window's result, free the seats of those that ended, and say what to tell whom.

    A cancelled sequence gets no event; its seat is freed here as well.
    """
    for start in plan.starts:
        table[start.slot].is_started = True
        table[start.slot].resume = None
    if plan.chunks:
        _count_reading(table, plan)
    broken = broken_slots(plan, result)
    produced = {tokens.slot: tokens for tokens in result.tokens}
    read = {chunk.slot for chunk in plan.chunks}
    drafting = {step.slot: step for step in plan.decodes if step.max_draft > 0}
    events: list[SequenceEvent] = []
    for slot in table.settled():
        sequence, index = slot.sequence, slot.index
        if sequence.cancelled:
            table.release(index)
        elif index in broken:
            table.release(index)
            events.append((sequence, Failed(error=broken[index])))
        elif (tokens := produced.get(index)) is not None:
            if index not in read:
                sequence.num_steps += 1
                if (step := drafting.get(index)) is not None:
                    _count_drafts(sequence, step, tokens)
            events.append((sequence, _extend(sequence, tokens)))
            if (reason := sequence.finish_reason()) is not None:
                table.release(index)
                events.append((sequence, _finished(sequence, reason)))
    return tuple(events)


class Flight:
    """Work whose answer has not come yet (WindowResult.in_flight)."""

    def __init__(self) -> None:
        self._chunks: dict[int, PrefillChunk] = {}
        self._decodes: dict[int, DecodeStep] = {}

    def landed(self, plan: WindowPlan, result: WindowResult) -> WindowPlan:
        """The plan with the work that this result answers, of this window or an earlier one, in place of its own."""
        if not result.in_flight and not self._chunks and not self._decodes:
            return plan
        chunks = [*self._chunks.values(), *plan.chunks]
        decodes = [*self._decodes.values(), *plan.decodes]
        flying = result.in_flight
        self._chunks = {c.slot: c for c in chunks if c.is_last and c.slot in flying}
        self._decodes = {step.slot: step for step in decodes if step.slot in flying}
        return replace(
            plan,
            chunks=tuple([c for c in chunks if c.slot not in self._chunks or not c.is_last]),
            decodes=tuple([step for step in decodes if step.slot not in self._decodes]),
        )

    def clear(self) -> None:
        """The engine is gone, and what it had begun."""
        self._chunks.clear()
        self._decodes.clear()


def broken_slots(plan: WindowPlan, result: WindowResult) -> dict[int, SlotFailed]:
    """The slots whose state cannot be trusted after this window, and why."""
    asked = {step.slot for step in plan.decodes}
    asked.update([chunk.slot for chunk in plan.chunks if chunk.is_last])
    silent = asked.difference([tokens.slot for tokens in result.tokens])
    broken = {slot: SlotFailed(_NO_TOKENS) for slot in silent}
    for failure in result.failures:
        kind = GrammarFailed if failure.is_grammar else SlotFailed
        broken[failure.slot] = kind(failure.message)
    return broken


def _count_reading(table: SlotTable, plan: WindowPlan) -> None:
    for chunk in plan.chunks:
        table[chunk.slot].num_read_tokens += len(chunk.token_ids)
    picked = {chunk.slot for chunk in plan.chunks}
    for slot in table.in_phase(Phase.READING):
        slot.sequence.num_passes = 0 if slot.index in picked else slot.sequence.num_passes + 1


def _count_drafts(sequence: SequenceState, step: DecodeStep, tokens: SlotTokens) -> None:
    sequence.num_drafted_tokens += tokens.num_drafted
    sequence.num_accepted_tokens += min(tokens.num_accepted, len(tokens.token_ids))
    sequence.acceptance = _observed(sequence.acceptance, step, tokens)


def _observed(acceptance: Acceptance, step: DecodeStep, tokens: SlotTokens) -> Acceptance:
    return acceptance.observe(
        max_draft=step.max_draft, num_drafted=tokens.num_drafted, num_accepted=tokens.num_accepted
    )


def _extend(sequence: SequenceState, tokens: SlotTokens) -> Tokens:
    """Add a window's tokens to their sequence, which has read its prompt by now."""
    token_ids, output_ids = tokens.token_ids, sequence.output_ids
    num_wanted = sequence.request.max_tokens - len(output_ids)
    assert 0 < len(token_ids) <= num_wanted, "the engine overshot max_tokens"
    output_ids += token_ids
    sequence.phase = _DECODING
    return Tokens(token_ids=token_ids, logprobs=tokens.logprobs)


def _finished(sequence: SequenceState, reason: FinishReason) -> Finished:
    stop_id = sequence.output_ids[-1] if reason is FinishReason.STOP else None
    return Finished(reason=reason, stop_token_id=stop_id, usage=sequence.usage())


def measured(
    table: SlotTable,
    pace: Pace,
    plan: WindowPlan,
    result: WindowResult,
    seconds: float,
    gap_s: float | None = None,
) -> Pace:
    """The pace after one more window, whose result is not applied yet.

    seconds: from plan to result; gap_s: from the last result to this plan, if there was no pause in between.
    """
    share = pace.share.after(result.times, has_decodes=bool(plan.decodes))
    decoded = result.tokens
    if read := {chunk.slot for chunk in plan.chunks}:
        decoded = [tokens for tokens in decoded if tokens.slot not in read]
    if not decoded:
        return replace(pace, share=share)
    everyone, num_rows, num_draft_steps = pace.everyone, len(decoded), 0
    drafting = {slot.index for slot in table if slot.sequence.max_draft > 0}
    steps = {step.slot: step for step in plan.decodes if step.slot in drafting} if drafting else {}
    for tokens in decoded if steps else ():
        step = steps.get(tokens.slot)
        if step is not None and step.max_draft > 0:
            num_rows += tokens.num_drafted
            num_draft_steps = max(num_draft_steps, min(step.max_draft, tokens.num_drafted + 1))
            everyone = _observed(everyone, step, tokens)
    costs = pace.costs.observe(
        num_rows=num_rows,
        num_draft_steps=num_draft_steps,
        uses_drafts=bool(steps),
        times=result.times,
        rest_s=_rest_s(result, seconds, gap_s),
        hidden_s=gap_s,
    )
    return Pace(share=share, costs=costs, everyone=everyone, num_windows=pace.num_windows + 1)


def _rest_s(result: WindowResult, seconds: float, gap_s: float | None) -> float | None:
    """What a window took beside the engine's work, from result to result; None while another is under way, with which
    its times are mixed."""
    times = result.times
    if result.in_flight:
        return None
    late_s = times.draft_s - times.ahead_s
    if gap_s is not None:
        late_s += max(0.0, times.ahead_s - gap_s)
        seconds += gap_s
    return seconds - times.prefill_s - times.verify_s - late_s
