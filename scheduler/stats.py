"""Counters of the loop and their frozen snapshots for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from cache.disk import DiskStats
from cache.store import StoreStats
from engine.interface import MAX_SPEC, WindowPlan, WindowResult
from scheduler.errors import DeadlineExceeded, EngineDead, SlotFailed
from scheduler.messages import Failed, Finished, FinishReason

if TYPE_CHECKING:
    from scheduler.sequence import Phase

__all__ = [
    "Counters",
    "DiskStats",
    "EngineState",
    "Outcome",
    "SchedulerStats",
    "SlotView",
    "StoreStats",
    "Totals",
    "outcome_of",
]


class EngineState(StrEnum):
    """The engine process as its supervisor sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    """Given up after repeated deaths."""
    CLOSED = "closed"


class Outcome(StrEnum):
    """How an admitted request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ENGINE_DEAD = "engine_dead"
    SLOT_FAILED = "slot_failed"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One seat at one moment."""

    index: int
    request_id: str | None
    """None: free; the counts are 0 then."""
    phase: Phase | None
    prompt_tokens: int
    read_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts since the start; they only grow."""

    submitted: int
    """Admitted requests: their outcomes, plus those waiting and seated."""
    rejected: int
    """Submissions refused by the queue bound."""
    outcomes: tuple[tuple[Outcome, int], ...]
    """Every Outcome, also at 0."""
    prompt_tokens: int
    """Read by the engine."""
    completion_tokens: int
    """Published."""
    drafts_offered: tuple[int, ...]
    """By depth, 1 to MAX_SPEC: drafts that entered a verify window."""
    drafts_accepted: tuple[int, ...]
    """By depth."""
    preemptions: int
    """Decoding sequences that gave their slot to another."""
    windows: int
    window_s: float
    """Seconds from plan to result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Everything at one moment."""

    queued: int
    slots: tuple[SlotView, ...]
    totals: Totals
    parking: StoreStats | None
    """None before the first engine is ready."""
    disk: DiskStats | None
    """None without a directory for conversation files."""
    engine_state: EngineState
    restarts: int
    draining: bool


@dataclass(slots=True, kw_only=True)
class Counters:
    """The loop's running totals."""

    submitted: int = 0
    rejected: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafts_offered: list[int] = field(default_factory=lambda: [0] * MAX_SPEC)
    drafts_accepted: list[int] = field(default_factory=lambda: [0] * MAX_SPEC)
    preemptions: int = 0
    windows: int = 0
    window_s: float = 0.0

    def count_window(self, plan: WindowPlan, result: WindowResult, seconds: float) -> None:
        self.windows += 1
        self.window_s += seconds
        self.prompt_tokens += sum(len(chunk.token_ids) for chunk in plan.chunks)
        for tokens in [tokens for tokens in result.tokens if tokens.num_drafted > 0]:
            for depth in range(tokens.num_drafted):
                self.drafts_offered[depth] += 1
            for depth in range(tokens.num_accepted):
                self.drafts_accepted[depth] += 1

    def snapshot(self) -> Totals:
        return Totals(
            submitted=self.submitted,
            rejected=self.rejected,
            outcomes=tuple(self.outcomes.items()),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            drafts_offered=tuple(self.drafts_offered),
            drafts_accepted=tuple(self.drafts_accepted),
            preemptions=self.preemptions,
            windows=self.windows,
            window_s=self.window_s,
        )


def outcome_of(event: Finished | Failed) -> Outcome:
    """How a request ended, by its last event."""
    match event:
        case Finished(reason=FinishReason.STOP):
            return Outcome.STOP
        case Finished(reason=FinishReason.LENGTH):
            return Outcome.LENGTH
        case Failed(error=DeadlineExceeded()):
            return Outcome.DEADLINE
        case Failed(error=EngineDead()):
            return Outcome.ENGINE_DEAD
        case Failed(error=SlotFailed()):
            return Outcome.SLOT_FAILED
        case _:
            return Outcome.SHUTDOWN
