"""SequenceState: one request's ids and counters while the scheduler works on it.

Owned by the scheduler's loop; nobody else writes it. Knows neither slots nor the caller's handle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from scheduler.draft import Acceptance
from scheduler.messages import FinishReason, GenerateRequest, Usage

if TYPE_CHECKING:
    from engine.interface import Resume


class Phase(StrEnum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """For its first slot, or suspended."""
    READING = "reading"
    """Seated; its prompt is being read."""
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """A request and how far it has come."""

    request: GenerateRequest
    arrival: int
    """Number of the submission: identity and order."""
    deadline_at_s: float | None
    """On the scheduler's clock."""
    max_draft: int
    """Longest draft chain: the least of request, server and engine."""
    spec_min_p: float
    leader: SequenceState | None = None
    """One with the same prompt, which is read first; this one goes on from what it parks."""
    has_followers: bool = False
    """Others wait for its prompt to be read."""
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    num_read_tokens: int = 0
    """Prompt tokens [0, num_read_tokens) are in the slot's state."""
    num_cached_tokens: int = 0
    """... and the first so many of them were not read for this request."""
    resume: Resume | None = None
    """What its next start begins from."""
    is_fetching: bool = False
    """It waits for parked state to come from disk, and takes no slot meanwhile."""
    waiting_since_s: float = 0.0
    seated_at_s: float = 0.0
    num_suspensions: int = 0
    """How often it gave its slot to another, or was asked to and there was no room to keep it."""
    is_started: bool = False
    """Whether the engine knows that it sits in its slot."""
    num_passes: int = 0
    """Chunk boundaries at which others went first since the last chunk of this prompt."""
    output_ids: list[int] = field(default_factory=list[int])
    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_unread_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_read_tokens

    @property
    def is_held(self) -> bool:
        """Whether it waits for more than a slot: for its leader's reading, or for what comes from disk."""
        leader = self.leader
        if leader is not None and leader.phase is not Phase.ENDED and not leader.output_ids:
            return True
        return self.is_fetching

    @property
    def num_computed_tokens(self) -> int:
        """Positions whose state the engine has, while decoding: all but the last output token."""
        return self.num_prompt_tokens + len(self.output_ids) - 1

    @property
    def num_wanted_tokens(self) -> int:
        """Output tokens until max_tokens."""
        return self.request.max_tokens - len(self.output_ids)

    @property
    def draft_cap(self) -> int:
        """Longest chain whose window cannot overshoot max_tokens."""
        return max(0, min(self.max_draft, self.num_wanted_tokens - 1))

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_at_s is not None and now_s >= self.deadline_at_s

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence is over, if it is; a stop id on the last allowed place counts as a stop."""
        output_ids, request = self.output_ids, self.request
        if output_ids and output_ids[-1] in request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output_ids) >= request.max_tokens else None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=len(self.output_ids),
            cached_tokens=self.num_cached_tokens,
            drafted_tokens=self.num_drafted_tokens,
            accepted_tokens=self.num_accepted_tokens,
            windows=self.num_steps,
        )
