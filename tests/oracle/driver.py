"""The smallest scheduler that can drive an engine: seats jobs, cuts prompts at the chunk size, decodes until done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.interface import (
    DecodeStep,
    Engine,
    PrefillChunk,
    SamplingParams,
    SlotStart,
    SlotTokens,
    WindowPlan,
)

if TYPE_CHECKING:
    from engine.engine import TorchEngine

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request."""

    prompt: Sequence[int]
    num_tokens: int
    sampling: SamplingParams = GREEDY
    max_draft: int = 0
    min_p: float = 0.0
    slot: int = 0
    first_round: int = 0
    """Rounds that pass before it is seated."""
    draft_from: int = 0
    """Output tokens before which nothing is drafted."""

    def draft_length(self, num_output: int) -> int:
        """Longest chain of the window after `num_output` tokens."""
        if num_output < self.draft_from:
            return 0
        return min(self.max_draft, self.num_tokens - num_output - 1)


@dataclass(kw_only=True)
class Progress:
    """What a job has so far."""

    job: Job
    num_read: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    steps: list[SlotTokens] = field(default_factory=list[SlotTokens])
    """Results of the decode windows, in order."""

    @property
    def is_done(self) -> bool:
        if not self.token_ids:
            return False
        ended = self.token_ids[-1] in self.job.sampling.stop_token_ids
        return ended or len(self.token_ids) >= self.job.num_tokens


def generate(engine: Engine, *jobs: Job) -> list[Progress]:
    """Run all jobs to their end, each in its slot; results in the order of the jobs."""
    all_progress = [Progress(job=job) for job in jobs]
    in_flight: tuple[int, ...] = ()
    for round_number in range(10_000):
        seated = [p for p in all_progress if p.job.first_round <= round_number and not p.is_done]
        if not seated and all(p.is_done for p in all_progress):
            return all_progress
        free = [p for p in seated if p.job.slot not in in_flight]
        result = engine.run_window(_plan(free, engine.info.chunk_tokens, round_number))
        in_flight = result.in_flight
        assert result.failures == ()
        for tokens in result.tokens:
            _apply(next(p for p in seated if p.job.slot == tokens.slot), tokens)
    raise AssertionError("the jobs do not end")


def generate_alone(engine: Engine, job: Job) -> list[int]:
    """The token ids of a job that nobody shares the engine with."""
    return generate(engine, job)[0].token_ids


def seat(engine: TorchEngine, *slots: int) -> None:
    """Make slots fresh."""
    starts = tuple(SlotStart(slot=slot, sampling=GREEDY) for slot in slots)
    engine.run_window(WindowPlan(starts=starts))


def _plan(seated: list[Progress], chunk_tokens: int, round_number: int) -> WindowPlan:
    starts = [
        SlotStart(slot=p.job.slot, sampling=p.job.sampling)
        for p in seated
        if p.job.first_round == round_number
    ]
    chunks = [_chunk(p, chunk_tokens) for p in seated if p.num_read < len(p.job.prompt)]
    reading = {chunk.slot for chunk in chunks}
    decodes = [
        DecodeStep(
            slot=p.job.slot,
            max_draft=p.job.draft_length(len(p.token_ids)),
            spec_min_p=p.job.min_p,
        )
        for p in seated
        if p.job.slot not in reading
    ]
    return WindowPlan(starts=tuple(starts), chunks=tuple(chunks), decodes=tuple(decodes))


def _chunk(progress: Progress, chunk_tokens: int) -> PrefillChunk:
    prompt, start = progress.job.prompt, progress.num_read
    end = min((start // chunk_tokens + 1) * chunk_tokens, len(prompt))
    progress.num_read = end
    return PrefillChunk(
        slot=progress.job.slot,
        start=start,
        token_ids=tuple(prompt[start:end]),
        is_last=end == len(prompt),
    )


def _apply(progress: Progress, tokens: SlotTokens) -> None:
    if progress.token_ids:
        progress.steps.append(tokens)
    progress.token_ids.extend(tokens.token_ids)
