"""Hand-made samples and records."""

from __future__ import annotations

from typing import Any

from loadtest.client import Outcome, RequestRecord
from loadtest.scrape import Sample


def sample(**values: Any) -> Sample:
    fields: dict[str, Any] = {
        "time_s": 0.0,
        "slots": 4.0,
        "slots_busy": 0.0,
        "queue_length": 0.0,
        "prompt_tokens": 0.0,
        "completion_tokens": 0.0,
        "drafts_offered": (),
        "drafts_accepted": (),
        "requests": (("stop", 0.0),),
        "request_prompt_tokens": (),
        "request_completion_tokens": (),
        "engine_restarts": 0.0,
        "engine_up": True,
        "parked_bytes": 0.0,
    }
    return Sample(**{**fields, **values})


def record(outcome: Outcome = Outcome.OK, **values: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "kind": "chat",
        "intended_start_s": 0.0,
        "start_s": 0.0,
        "end_s": 1.0,
        "chunk_times_s": (),
        "outcome": outcome,
        "expected": True,
        "status": 200,
        "prompt_tokens": 10,
        "completion_tokens": 5,
    }
    return RequestRecord(**{**fields, **values})
