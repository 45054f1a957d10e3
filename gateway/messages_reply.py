"""Answers in Anthropic's shape: the whole message, the events of a stream, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from sse_starlette import ServerSentEvent

from gateway.blocks import Block, BlockKind, Blocks, Closed, Grew, Opened
from gateway.replies import new_id

if TYPE_CHECKING:
    from gateway.blocks import BlockEvent
    from gateway.errors import ErrorReply
    from gateway.generation import ChoiceDelta, Generation
    from gateway.replies import JsonReply

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(reply: ErrorReply) -> JsonReply:
    """The error object."""
    kind = _ERROR_TYPES.get(reply.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": reply.message}}


def ping() -> ServerSentEvent:
    """What a silent stream says."""
    return ServerSentEvent(event="ping", data='{"type":"ping"}', sep="\n")


class MessageWriter:
    """One answer: give it every delta, then ask for the whole, or send what it makes of each."""

    def __init__(self, model: str, generation: Generation) -> None:
        self._id = new_id("msg_")
        self._model = model
        self._generation = generation
        self._blocks = Blocks("toolu_")
        self._has_calls = False

    def add(self, delta: ChoiceDelta) -> list[BlockEvent]:
        self._has_calls = delta.has_calls
        return self._blocks.push(delta)

    def whole(self) -> JsonReply:
        """The message, when every delta has been added."""
        content = [_whole_block(block) for block in self._blocks.blocks]
        return {**self._message(content), **self._ending(), "usage": self._usage()}

    def opening(self) -> bytes:
        usage = {**self._usage(), "output_tokens": 0}
        start = {
            **self._message([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=start) + _event("ping")

    def output(self, delta: ChoiceDelta) -> bytes:
        return b"".join(map(_block_event, self.add(delta)))

    def closing(self) -> bytes:
        delta = _event("message_delta", delta=self._ending(), usage=self._usage())
        return delta + _event("message_stop")

    def failure(self, reply: ErrorReply) -> bytes:
        return _frame("error", message_error(reply))

    def _message(self, content: list[JsonReply]) -> JsonReply:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _ending(self) -> JsonReply:
        choice = self._generation.choices[0]
        reason = "max_tokens"
        if choice.stop_string is not None:
            reason = "stop_sequence"
        elif choice.finish_reason == "stop":
            reason = "tool_use" if self._has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": choice.stop_string}

    def _usage(self) -> JsonReply:
        usage = self._generation.usage
        return {
            # There, tokens that were cached are not part of the input.
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _block_event(event: BlockEvent) -> bytes:
    match event:
        case Opened(block):
            return _event(
                "content_block_start", index=block.index, content_block=_block(block, "", {})
            )
        case Grew(block, piece):
            return _event("content_block_delta", index=block.index, delta=_delta(block, piece))
        case Closed(block):
            return _event("content_block_stop", index=block.index)


def _whole_block(block: Block) -> JsonReply:
    if block.kind is BlockKind.CALL:
        return _block(block, "", orjson.loads(block.text or "{}"))
    return _block(block, block.text, {})


def _block(block: Block, text: str, arguments: object) -> JsonReply:
    match block.kind:
        case BlockKind.THOUGHT:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": text}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _delta(block: Block, piece: str) -> JsonReply:
    match block.kind:
        case BlockKind.THOUGHT:
            return {"type": "thinking_delta", "thinking": piece}
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": piece}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": piece}


def _event(kind: str, **parts: object) -> bytes:
    return _frame(kind, {"type": kind, **parts})


def _frame(kind: str, payload: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(payload))
