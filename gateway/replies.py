"""OpenAI response shapes: whole answers and stream chunks as JSON bytes."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from gateway.tools import merged_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gateway.detokenize import OutputToken
    from gateway.generation import ChoiceDelta, RequestUsage
    from gateway.tokenizer import Tokenizer
    from gateway.tools import CallDelta

JsonReply = dict[str, object]

DONE = b"data: [DONE]\n\n"


def frame(payload: object) -> bytes:
    """One SSE event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What every part of one answer repeats."""

    id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> JsonReply:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def new_id(prefix: str) -> str:
    """An id no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"


def usage_reply(usage: RequestUsage) -> JsonReply:
    """The usage object."""
    details: JsonReply = {
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }
    if usage.reasoning_tokens is not None:
        details["reasoning_tokens"] = usage.reasoning_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }


def call_reply(call: CallDelta) -> JsonReply:
    """One entry of a delta's tool_calls."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": new_id("call_"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class LogprobWriter:
    """Log-probabilities in the two shapes that OpenAI has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, tokens: Iterable[OutputToken]) -> JsonReply:
        """The shape of chat completions."""
        return {"content": self._entries(tokens, no_bytes=None), "refusal": None}

    def response(self, tokens: Iterable[OutputToken]) -> list[JsonReply]:
        """The shape of responses, where bytes are never null."""
        return self._entries(tokens, no_bytes=[])

    def _entries(self, tokens: Iterable[OutputToken], *, no_bytes: object) -> list[JsonReply]:
        return [
            {
                **self._entry(token.id, token.logprobs.logprob, no_bytes),
                "top_logprobs": [
                    self._entry(token_id, logprob, no_bytes)
                    for token_id, logprob in token.logprobs.top
                ],
            }
            for token in tokens
        ]

    def completion(self, tokens: Sequence[OutputToken]) -> JsonReply:
        """The shape of completions."""
        name = self._tokenizer.token_text
        return {
            "tokens": [name(token.id) for token in tokens],
            "token_logprobs": [token.logprobs.logprob for token in tokens],
            "top_logprobs": [
                {name(token_id): logprob for token_id, logprob in token.logprobs.top}
                for token in tokens
            ],
            "text_offset": [token.text_offset for token in tokens],
        }

    def _entry(self, token_id: int, logprob: float, no_bytes: object) -> JsonReply:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": max(logprob, -9999.0),
            "bytes": list(data) if data else no_bytes,
        }


@dataclass(slots=True, kw_only=True)
class ChoiceText:
    """The parts of one choice of a whole answer."""

    reasoning: list[str] = field(default_factory=list[str])
    content: list[str] = field(default_factory=list[str])
    calls: list[CallDelta] = field(default_factory=list["CallDelta"])
    tokens: list[OutputToken] = field(default_factory=list["OutputToken"])
    finish_name: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.reasoning.append(delta.reasoning)
        self.content.append(delta.content)
        self.calls.extend(delta.calls)
        self.tokens.extend(delta.tokens)
        self.finish_name = delta.finish_name

    def message(self) -> JsonReply:
        """The assistant message of a chat completion."""
        content = "".join(self.content)
        calls = self._whole_calls()
        message: JsonReply = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _whole_calls(self) -> list[JsonReply]:
        replies = [call_reply(call) for call in merged_calls(self.calls)]
        return [{key: reply[key] for key in reply if key != "index"} for reply in replies]
