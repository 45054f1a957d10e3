"""Answers of /v1/responses: the response object and the events of a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import orjson

from gateway.blocks import Block, BlockKind, Blocks, Closed, Grew, Opened
from gateway.content_tokens import ContentTokens
from gateway.replies import new_id

if TYPE_CHECKING:
    from gateway.blocks import BlockEvent
    from gateway.errors import ErrorReply
    from gateway.fields import JsonObject
    from gateway.generation import ChoiceDelta, Generation
    from gateway.replies import JsonReply, LogprobWriter

_ITEM_PREFIX = {BlockKind.THOUGHT: "rs_", BlockKind.TEXT: "msg_", BlockKind.CALL: "fc_"}


class ResponseWriter:
    """One answer: give it every delta, then ask for the whole, or send what it makes of each."""

    def __init__(
        self, model: str, echo: JsonObject, generation: Generation, logprobs: LogprobWriter | None
    ) -> None:
        """logprobs: spells the text's log-probabilities; None when they were not asked for."""
        spans = generation.choices[0].content_spans
        self._logprobs = logprobs
        self._tokens = None if logprobs is None or spans is None else ContentTokens(spans)
        self._entries: dict[int, list[JsonReply]] = {}
        """Log-probabilities by block."""
        self._new_entries: list[JsonReply] = []
        """... of the text that is about to be told."""
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._model = model
        self._echo = echo
        self._generation = generation
        self._blocks = Blocks("call_")
        self._item_ids: list[str] = []
        self._num_events = 0

    def add(self, delta: ChoiceDelta) -> list[BlockEvent]:
        events = self._blocks.push(delta)
        for block in self._blocks.blocks[len(self._item_ids) :]:
            self._item_ids.append(new_id(_ITEM_PREFIX[block.kind]))
        if self._logprobs is not None and self._tokens is not None:
            is_last = delta.finish_reason is not None
            tokens = self._tokens.push(delta.tokens, is_last=is_last)
            self._keep(self._logprobs.response(tokens))
        return events

    def _keep(self, entries: list[JsonReply]) -> None:
        """Log-probabilities of the last text."""
        texts = [block for block in self._blocks.blocks if block.kind is BlockKind.TEXT]
        if texts:
            self._entries.setdefault(texts[-1].index, []).extend(entries)
        self._new_entries += entries

    def whole(self) -> JsonReply:
        """The response, when every delta has been added."""
        output = [self._item(block, self._status_of(block)) for block in self._blocks.blocks]
        response = self._response("incomplete" if self._is_cut else "completed", output)
        if self._is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**response, "completed_at": int(time.time()), "usage": self._usage()}

    def opening(self) -> bytes:
        response = self._response("in_progress", [])
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def output(self, delta: ChoiceDelta) -> bytes:
        return b"".join(map(self._block_event, self.add(delta)))

    def closing(self) -> bytes:
        response = self.whole()
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, reply: ErrorReply) -> bytes:
        code = reply.code or reply.type
        error = self._event("error", code=code, message=reply.message, param=reply.param)
        output = [self._item(block, "incomplete") for block in self._blocks.blocks]
        response = self._response("failed", output)
        response["error"] = {"code": code, "message": reply.message}
        return error + self._event("response.failed", response=response)

    @property
    def _is_cut(self) -> bool:
        return self._generation.choices[0].finish_reason == "length"

    def _status_of(self, block: Block) -> str:
        """Of a block that is closed: only the last one can be cut."""
        is_last = block is self._blocks.blocks[-1]
        return "incomplete" if self._is_cut and is_last else "completed"

    def _response(self, status: str, output: list[JsonReply]) -> JsonReply:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._echo,
        }

    def _usage(self) -> JsonReply:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _item(self, block: Block, status: str) -> JsonReply:
        """An output item; in progress it is still empty."""
        item: JsonReply = {"id": self._item_ids[block.index], "status": status}
        is_empty = status == "in_progress"
        parts = [] if is_empty else [self._part(block, block.text)]
        match block.kind:
            case BlockKind.THOUGHT:
                return {**item, "type": "reasoning", "summary": [], "content": parts}
            case BlockKind.TEXT:
                return {**item, "type": "message", "role": "assistant", "content": parts}
            case BlockKind.CALL:
                return {
                    **item,
                    "type": "function_call",
                    "call_id": block.id,
                    "name": block.name,
                    "arguments": "" if is_empty else block.text,
                }

    def _block_event(self, event: BlockEvent) -> bytes:
        match event:
            case Opened(block):
                return self._opened(block)
            case Grew(block, piece):
                return self._grew(block, piece)
            case Closed(block):
                return self._closed(block)

    def _opened(self, block: Block) -> bytes:
        item = self._item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is BlockKind.CALL:
            return added
        return added + self._part_event("added", block, part=self._part(block, ""))

    def _grew(self, block: Block, piece: str) -> bytes:
        match block.kind:
            case BlockKind.THOUGHT:
                return self._inner("response.reasoning_text.delta", block, delta=piece)
            case BlockKind.TEXT:
                entries, self._new_entries = self._new_entries, []
                kind = "response.output_text.delta"
                return self._inner(kind, block, delta=piece, logprobs=entries)
            case BlockKind.CALL:
                return self._outer("response.function_call_arguments.delta", block, delta=piece)

    def _closed(self, block: Block) -> bytes:
        text = block.text
        match block.kind:
            case BlockKind.THOUGHT:
                done = self._inner("response.reasoning_text.done", block, text=text)
                done += self._part_event("done", block, part=self._part(block, text))
            case BlockKind.TEXT:
                entries = self._entries.get(block.index, [])
                kind = "response.output_text.done"
                done = self._inner(kind, block, text=text, logprobs=entries)
                done += self._part_event("done", block, part=self._part(block, text))
            case BlockKind.CALL:
                kind = "response.function_call_arguments.done"
                done = self._outer(kind, block, name=block.name, arguments=text)
        item = self._item(block, self._status_of(block))
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _part_event(self, what: str, block: Block, **parts: object) -> bytes:
        return self._inner(f"response.content_part.{what}", block, **parts)

    def _inner(self, kind: str, block: Block, **parts: object) -> bytes:
        """An event about the one part of an item."""
        return self._outer(kind, block, content_index=0, **parts)

    def _outer(self, kind: str, block: Block, **parts: object) -> bytes:
        """An event about an item."""
        item_id = self._item_ids[block.index]
        return self._event(kind, item_id=item_id, output_index=block.index, **parts)

    def _event(self, kind: str, **parts: object) -> bytes:
        payload = {"type": kind, "sequence_number": self._num_events, **parts}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(payload))

    def _part(self, block: Block, text: str) -> JsonReply:
        if block.kind is BlockKind.THOUGHT:
            return {"type": "reasoning_text", "text": text}
        entries = self._entries.get(block.index, []) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
