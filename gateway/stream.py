"""Deltas to SSE frames; in OpenAI's spelling: the role first, exactly one finish chunk per choice, usage, [DONE].

An error after the first byte becomes one error event, then [DONE], and the connection ends. Leaving the stream, in
whatever way, cancels its sequences.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

import orjson
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError

from gateway.errors import TABLE, reply_for
from gateway.generation import ChoiceDelta
from gateway.replies import DONE, call_reply, frame, usage_reply
from gateway.tools import merged_calls
from scheduler.turn import NextTurn

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from gateway.errors import ErrorReply
    from gateway.generation import Generation
    from gateway.metrics import Meter
    from gateway.replies import JsonReply, LogprobWriter, ReplyHead
    from gateway.wire import StreamOptions

ABORT = "stratagate.abort"
"""Scope key, where the server has one: drops the connection with all that is buffered for it."""

CUT = "stratagate.cut"
"""Scope key: why the answer was broken off, for the line in the log."""

HANG_UP = "stratagate.hang_up"
"""Scope key, where the server has one: has the connection end with the answer that has begun on it."""

WRITE = "stratagate.write"
"""Scope key, where the server has one: the WriteNow of the connection, for the body of an answer that has begun."""

WriteNow = Callable[[bytes], bool]
"""Writes a piece of a body at once; False when the reader is behind, and then nothing of it was written."""

_log = logging.getLogger("stratagate.stream")


class ChunkWriter(Protocol):
    """How one endpoint spells its chunks."""

    kind: str
    """The `object` of every chunk."""

    def opening(self, index: int) -> JsonReply | None:
        """The choice object of the chunk before any output, if there is one."""
        ...

    def output(self, delta: ChoiceDelta) -> JsonReply:
        """The choice object of new output."""
        ...

    def ending(self, index: int, finish_reason: str) -> JsonReply:
        """The choice object of the finish chunk."""
        ...


class ChatChunks:
    """Chunks of chat completions."""

    kind = "chat.completion.chunk"

    def __init__(self, logprobs: LogprobWriter | None) -> None:
        self._logprobs = logprobs

    def opening(self, index: int) -> JsonReply:
        return self._choice(index, {"role": "assistant", "content": ""}, None)

    def output(self, delta: ChoiceDelta) -> JsonReply:
        parts: JsonReply = {}
        if delta.reasoning:
            parts["reasoning_content"] = delta.reasoning
        if delta.content or not (delta.reasoning or delta.calls):
            parts["content"] = delta.content
        if delta.calls:
            parts["tool_calls"] = [call_reply(call) for call in merged_calls(delta.calls)]
        logprobs = self._logprobs.chat(delta.tokens) if self._logprobs else None
        return self._choice(delta.index, parts, None, logprobs)

    def ending(self, index: int, finish_reason: str) -> JsonReply:
        return self._choice(index, {}, finish_reason)

    def _choice(
        self,
        index: int,
        delta: JsonReply,
        finish_reason: str | None,
        logprobs: JsonReply | None = None,
    ) -> JsonReply:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


class CompletionChunks:
    """Chunks of completions."""

    kind = "text_completion"

    def __init__(self, logprobs: LogprobWriter | None, echoes: tuple[str, ...]) -> None:
        """echoes: by choice, text to send before the output."""
        self._logprobs = logprobs
        self._echoes = echoes

    def opening(self, index: int) -> JsonReply | None:
        echo = self._echoes[index]
        return self._choice(index, echo, None) if echo else None

    def output(self, delta: ChoiceDelta) -> JsonReply:
        logprobs = self._logprobs.completion(delta.tokens) if self._logprobs else None
        return self._choice(delta.index, delta.content, None, logprobs)

    def ending(self, index: int, finish_reason: str) -> JsonReply:
        return self._choice(index, "", finish_reason)

    def _choice(
        self, index: int, text: str, finish_reason: str | None, logprobs: JsonReply | None = None
    ) -> JsonReply:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


class FrameWriter(Protocol):
    """How one API spells a stream: every method returns whole frames, or nothing."""

    def opening(self) -> bytes:
        """What is sent before the prompt is read."""
        ...

    def output(self, delta: ChoiceDelta) -> bytes:
        """News of a choice."""
        ...

    def closing(self) -> bytes:
        """The end of a stream that ended well."""
        ...

    def failure(self, reply: ErrorReply) -> bytes:
        """The end of a stream that did not."""
        ...


_SAMPLE = "sample"
_SAMPLE_JSON = orjson.dumps(_SAMPLE)


class ChunkFrames:
    """OpenAI's chunks."""

    def __init__(
        self,
        head: ReplyHead,
        generation: Generation,
        chunks: ChunkWriter,
        delivery: StreamOptions,
    ) -> None:
        self._generation = generation
        self._chunks = chunks
        self._delivery = delivery
        # The part of every chunk that does not change, up to the choices.
        self._prefix = b"data: " + orjson.dumps(head.head(chunks.kind))[:-1] + b',"choices":['
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self) -> bytes:
        opening = [self._chunks.opening(choice.index) for choice in self._generation.choices]
        return b"".join(self._chunk(choice) for choice in opening if choice is not None)

    def output(self, delta: ChoiceDelta) -> bytes:
        content = delta.content
        is_plain = content and not (delta.reasoning or delta.calls or delta.tokens)
        if is_plain and not self._delivery.continuous_usage:
            before, after = self._around.get(delta.index) or self._around_text(delta.index)
            data = before + orjson.dumps(content) + after
        else:
            data = self._chunk(self._chunks.output(delta)) if delta.has_output else b""
        if delta.finish_reason is None:
            return data
        finish_name = delta.finish_name
        assert finish_name is not None
        return data + self._chunk(self._chunks.ending(delta.index, finish_name))

    def closing(self) -> bytes:
        if not self._delivery.include_usage:
            return DONE
        usage = orjson.dumps(usage_reply(self._generation.usage))
        return b'%b],"usage":%b}\n\n%b' % (self._prefix, usage, DONE)

    def failure(self, reply: ErrorReply) -> bytes:
        return frame(reply.body()) + DONE

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """What chunks of a choice that have nothing but content have before and behind it."""
        sample = ChoiceDelta(index=index, content=_SAMPLE)
        before, _, after = self._chunk(self._chunks.output(sample)).rpartition(_SAMPLE_JSON)
        self._around[index] = before, after
        return before, after

    def _chunk(self, choice: JsonReply) -> bytes:
        return b"%b%b]%b}\n\n" % (self._prefix, orjson.dumps(choice), self._usage_so_far())

    def _usage_so_far(self) -> bytes:
        if self._delivery.continuous_usage:
            return b',"usage":' + orjson.dumps(usage_reply(self._generation.usage))
        # With include_usage OpenAI's chunks carry a null until the last one.
        return b',"usage":null' if self._delivery.include_usage else b""


_REST, _MAX_REST_S = 10.0, 0.004


def writing_turn() -> NextTurn:
    """In which all streams of a server write.

    By then every one has made its frames of a window: system calls in between would cost each of them a cold cache. A
    write costs more than all else of a frame, and little more for several than for one: so where windows come faster
    than a tenth of the time suffices to write, the frames of several leave at once, the first _MAX_REST_S late at most.
    It takes dozens of streams or windows of less than a millisecond to get there.
    """
    return NextTurn(rest=_REST, max_rest_s=_MAX_REST_S)


class FrameStream(AsyncIterator[bytes]):
    """The SSE frames of one answer.

    They are written with no task woken for them as long as the connection takes them; what it does not take is kept
    for whoever iterates.
    """

    def __init__(
        self, generation: Generation, writer: FrameWriter, meter: Meter, writing: NextTurn
    ) -> None:
        """writing: the server's writing_turn."""
        self._generation = generation
        self._writing = writing
        self._writer = writer
        self._meter = meter
        self._write: WriteNow | None = None
        self._hang_up: Callable[[], object] | None = None
        self._kept: list[bytes] = []
        self._num_uncounted = 0
        """Tokens that the meter has not been told of."""
        self._is_due = False
        """`_flush` will be called."""
        self._is_taken = False
        """What the iterator gave last is on its way: nothing may overtake it."""
        self._is_over = False
        self._news = asyncio.Event()
        self.last_sent_s = time.monotonic()
        """When something was last written, or given to the iterator."""

    def start(self, write: WriteNow | None, hang_up: Callable[[], object] | None = None) -> None:
        """Begin to make frames; without `write` all of them are kept. A failure calls `hang_up`."""
        self._write, self._hang_up = write, hang_up
        try:
            self._put(self._writer.opening())
            self._generation.start(self._deliver, self._end)
        except Exception as error:
            self._end(error)

    def close(self) -> None:
        """Cancel the sequences if they still run. Idempotent."""
        self._generation.close()
        self._count()
        self._meter.ended("cancelled")

    async def __anext__(self) -> bytes:
        """One or more whole frames."""
        self._is_taken = False
        while not self._kept:
            if self._is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        data = b"".join(self._kept)
        self._kept.clear()
        self._is_taken = True
        self.last_sent_s = time.monotonic()
        return data

    def _deliver(self, delta: ChoiceDelta) -> None:
        self._num_uncounted += delta.num_tokens
        data = self._writer.output(delta)
        if data:
            self._kept.append(data)
        if not self._is_due:
            self._is_due = True
            self._writing.call(self._flush)

    def _end(self, error: Exception | None) -> None:
        self._count()
        try:
            if error is not None:
                raise error
            self._meter.ended(self._generation.outcome)
            data = self._writer.closing()
        except Exception as failure:
            self._generation.close()
            data = self._failure(failure)
            if self._hang_up is not None:
                self._hang_up()
        self._is_over = True
        self._put(data)

    def _put(self, data: bytes) -> None:
        self._kept.append(data)
        if not self._is_due:
            self._is_due = True
            self._writing.call(self._flush)

    def _count(self) -> None:
        """Tell the meter, once for all that is written together."""
        num_tokens, self._num_uncounted = self._num_uncounted, 0
        self._meter.delivered(num_tokens)

    def _flush(self) -> None:
        self._is_due = False
        self._count()
        if self._is_taken:
            return  # the iterator comes back for the rest
        if self._kept and self._write is not None and self._write(b"".join(self._kept)):
            self._kept.clear()
            self.last_sent_s = self._writing.began_s
        if self._kept or self._is_over:
            self._news.set()

    def _failure(self, error: Exception) -> bytes:
        reply = reply_for(error)
        if type(error) not in TABLE:
            _log.error("stream failed", exc_info=error)
        self._meter.ended(reply.code or reply.type)
        return self._writer.failure(reply)


class FrameResponse(EventSourceResponse):
    """Sends frames; keep-alive comments in between; whatever ends it also ends the generation.

    A reader that takes nothing for `send_timeout_s` is left. One watch looks for that a few times in this span: a
    timer for each of many small sends would cost more than the sends.
    """

    def __init__(
        self,
        stream: FrameStream,
        *,
        keepalive_s: float,
        send_timeout_s: float,
        keep_alive: Callable[[], ServerSentEvent] | None = None,
    ) -> None:
        """keep_alive: what a silent stream says; a comment if not given."""
        super().__init__(  # pyright: ignore[reportUnknownMemberType] - a bare dict in its types
            stream,
            ping=keepalive_s,
            data_sender_callable=self._watch_sends,
            send_timeout=send_timeout_s,
            sep="\n",
        )
        # HTTP/1.1 has it so anyway, and a connection that will be closed must not say it.
        del self.headers["connection"]
        self._stream = stream
        self._keepalive_s = keepalive_s
        self._keep_alive = keep_alive or _keep_alive
        self._write: WriteNow | None = None
        self._hang_up: Callable[[], object] | None = None
        self._send_timeout_s = send_timeout_s
        self._pending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write, self._hang_up = scope.get(WRITE), scope.get(HANG_UP)
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            scope[CUT] = f"the reader took nothing for {self._send_timeout_s:g} s"
            # Closing would wait for ever for the reader to take what is buffered.
            if abort := scope.get(ABORT):
                abort()
        finally:
            self._stream.close()

    async def _stream_response(self, send: Send) -> None:
        """The library's loop without its timer around each send."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        self._stream.start(self._write, self._hang_up)
        async for data in self._stream:
            await self._send_watched(send, data)
        # The lock keeps a keep-alive comment from coming behind the end.
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_watched(self, send: Send, body: bytes) -> None:
        if self._pending_since_s is None:
            self._pending_since_s = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._pending_since_s = None

    async def _ping(self, send: Send) -> None:
        """The library's, but only while nothing else is sent."""
        while self.active:
            silent_s = time.monotonic() - self._stream.last_sent_s
            if silent_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - silent_s)
                continue
            body = self._keep_alive().encode()
            async with self._send_lock:
                if self.active:
                    await self._send_watched(send, body)
            self._stream.last_sent_s = time.monotonic()

    async def _watch_sends(self) -> None:
        """Raises SendTimeoutError, which ends the response's other tasks."""
        while self.active:
            await asyncio.sleep(self._send_timeout_s / 4)
            since_s = self._pending_since_s
            if since_s is not None and time.monotonic() - since_s >= self._send_timeout_s:
                raise SendTimeoutError


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")
