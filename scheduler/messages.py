"""What the gateway and the scheduler say to each other: frozen, ids and numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from engine.interface import (
    MAX_SLOTS,
    MAX_SPEC,
    MAX_TOP_LOGPROBS,
    EngineInfo,
    Grammar,
    GrammarKind,
    PlanItem,
    SamplingParams,
    Thought,
    TokenLogprobs,
)

__all__ = [
    "MAX_SLOTS",
    "MAX_SPEC",
    "MAX_TOP_LOGPROBS",
    "EngineInfo",
    "Failed",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "Grammar",
    "GrammarKind",
    "PlanItem",
    "SamplingParams",
    "Thought",
    "TokenEvent",
    "TokenLogprobs",
    "Tokens",
    "Usage",
]


class FinishReason(StrEnum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A validated request: prompt ids and how to continue them.

    `0 < len(prompt_ids)` and `len(prompt_ids) + max_tokens <= max_context` were proved by whoever built it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    """>= 1."""
    owner: str = ""
    """Name of the API key's owner; conversations are never shared between owners."""
    conversation_key: str = ""
    """Groups the turns of one conversation for routing and fairness; empty if the client gave none."""
    max_draft: int | None = None
    """Longest draft chain of this request, 0 to MAX_SPEC; None takes the server's."""
    spec_min_p: float | None = None
    """Draft gate of this request, 0 to 1; None takes the server's."""
    priority: int = 0
    """Larger goes first."""
    deadline_s: float | None = None
    """Seconds from submission after which the request is given up; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one finished sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were not read again."""
    drafted_tokens: int
    """Drafts that entered a verify window."""
    accepted_tokens: int
    """Drafts that were kept."""
    windows: int
    """Windows that decoded."""


class Tokens(Struct, frozen=True, kw_only=True, gc=False):
    """New output ids, in order; a stop id is included."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last event of a sequence that ended well."""

    reason: FinishReason
    stop_token_id: int | None
    """The stop id that ended it, if one did."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Last event of a sequence that could not go on."""

    error: Exception


TokenEvent = Tokens | Finished | Failed
