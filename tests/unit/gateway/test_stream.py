from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson
import pytest

from gateway.generation import Choice, ChoiceDelta, Generation
from gateway.metrics import Meter, Metrics
from gateway.preparation import PreparedChoice
from gateway.replies import ReplyHead
from gateway.stream import (
    ChatChunks,
    ChunkFrames,
    ChunkWriter,
    CompletionChunks,
    FrameResponse,
    FrameStream,
)
from gateway.wire import StreamOptions
from scheduler.errors import Overloaded
from scheduler.handle import RequestHandle
from scheduler.messages import Finished, FinishReason, Tokens, Usage
from scheduler.turn import NextTurn
from tests.conformance.live import default_files
from tests.factories import make_request

if TYPE_CHECKING:
    from starlette.types import Message

    from scheduler.messages import GenerateRequest
    from scheduler.stats import SchedulerStats


def no_stats() -> SchedulerStats:
    raise AssertionError("a stream never asks for statistics: only /metrics does")


def choice(index: int) -> Choice:
    prepared = PreparedChoice(index=index, request=make_request(), in_thought=False, echo="")
    return Choice(prepared, default_files(), (), None)


def make_handle(request: GenerateRequest) -> RequestHandle:
    return RequestHandle(request, submitted_s=0.0, on_cancel=lambda: None)


async def test_a_response_that_cannot_even_begin_cancels_its_sequences() -> None:
    handles: list[RequestHandle] = []

    def submit(request: GenerateRequest, leader: RequestHandle | None) -> RequestHandle:
        assert leader is (handles[0] if handles else None)
        handles.append(make_handle(request))
        return handles[-1]

    generation = Generation([choice(0), choice(1)], submit, counts_reasoning=False)
    writer = ChunkFrames(
        ReplyHead(id="1", model="m", fingerprint="f"),
        generation,
        ChatChunks(None),
        StreamOptions(stream=True),
    )
    meter = Meter(Metrics(no_stats), "chat", lambda: 0.0)
    frames = FrameStream(generation, writer, meter, NextTurn())
    response = FrameResponse(frames, keepalive_s=10.0, send_timeout_s=10.0)

    async def send(message: Message) -> None:
        raise OSError("gone")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(OSError, match="gone"):
        await response({"type": "http", "method": "POST"}, receive, send)
    assert [handle.cancelled for handle in handles] == [True, True]


async def test_a_submission_that_fails_takes_the_earlier_ones_back() -> None:
    handles: list[RequestHandle] = []

    def submit(request: GenerateRequest, leader: RequestHandle | None) -> RequestHandle:
        if len(handles) == 2:
            raise Overloaded("full", retry_after_s=1.0)
        assert leader is (handles[0] if handles else None)
        handles.append(make_handle(request))
        return handles[-1]

    with pytest.raises(Overloaded):
        Generation([choice(index) for index in range(4)], submit, counts_reasoning=False)
    assert [handle.cancelled for handle in handles] == [True, True]


USAGE = Usage(
    prompt_tokens=1,
    completion_tokens=2,
    cached_tokens=0,
    drafted_tokens=0,
    accepted_tokens=0,
    windows=2,
)
END = Finished(reason=FinishReason.LENGTH, stop_token_id=None, usage=USAGE)


class Line:
    """A stream of one choice, its handle, and a connection that takes bytes or does not."""

    def __init__(self) -> None:
        handles: list[RequestHandle] = []

        def submit(request: GenerateRequest, leader: RequestHandle | None) -> RequestHandle:
            handles.append(make_handle(request))
            return handles[-1]

        self.generation = Generation([choice(0)], submit, counts_reasoning=False)
        self.writer = frames_of(self.generation, ChatChunks(None))
        self.metrics = Metrics(no_stats)
        meter = Meter(self.metrics, "chat", lambda: 0.0)
        self.stream = FrameStream(self.generation, self.writer, meter, NextTurn())
        (self.handle,) = handles
        self.takes = True
        self.written: list[bytes] = []

    def write(self, data: bytes) -> bool:
        if self.takes:
            self.written.append(data)
        return self.takes

    async def say(self, *token_ids: int) -> None:
        """One window's tokens, and the loop's turns until their frames are made and offered."""
        self.handle.publish(Tokens(token_ids=token_ids), 0.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def frames_of(
    generation: Generation, chunks: ChunkWriter, *, include_usage: bool = False
) -> ChunkFrames:
    head = ReplyHead(id='sample"', model="sample", fingerprint="f")
    return ChunkFrames(
        head, generation, chunks, StreamOptions(stream=True, include_usage=include_usage)
    )


def contents(frames: bytes) -> list[str]:
    """The content of every chunk that has some."""
    data = [event.removeprefix(b"data: ") for event in frames.split(b"\n\n") if event]
    choices = [orjson.loads(one)["choices"][0] for one in data if one != b"[DONE]"]
    return [part for choice in choices if (part := choice["delta"].get("content"))]


def text_of(token_id: int) -> str:
    return default_files().tokenizer.token_bytes(token_id).decode()


async def test_frames_are_written_once_a_window_while_the_connection_takes_them() -> None:
    line = Line()
    line.stream.start(line.write)
    await asyncio.sleep(0)
    opening = len(line.written)
    await line.say(300)
    await line.say(301, 302)
    assert [contents(data) for data in line.written[opening:]] == [
        [text_of(300)],
        [text_of(301) + text_of(302)],
    ]
    line.handle.publish(END, 0.0)
    assert [data async for data in line.stream] == []
    assert line.written[-1].endswith(b"data: [DONE]\n\n")


async def test_what_several_windows_brought_leaves_in_one_write_a_chunk_for_each() -> None:
    line = Line()
    line.stream.start(line.write)
    await asyncio.sleep(0)
    opening = len(line.written)
    line.handle.publish(Tokens(token_ids=(300,)), 0.0)
    await line.say(301)
    assert [contents(data) for data in line.written[opening:]] == [[text_of(300), text_of(301)]]


@pytest.mark.parametrize("takes", [True, False])
async def test_tokens_are_counted_once_for_what_is_written_together(takes: bool) -> None:
    line = Line()
    line.takes = takes
    line.stream.start(line.write)
    await asyncio.sleep(0)
    counted = line.metrics.tokens
    line.handle.publish(Tokens(token_ids=(300,)), 0.0)
    await line.say(301, 302)
    assert (counted.num_tokens, counted.num_gaps) == (3, 0)
    await line.say(303)
    assert (counted.num_tokens, counted.num_gaps) == (4, 1)
    line.handle.publish(Tokens(token_ids=(304,)), 0.0)
    await asyncio.sleep(0)
    line.stream.close()
    assert counted.num_tokens == 5


async def test_what_the_connection_does_not_take_waits_and_nothing_overtakes_it() -> None:
    line = Line()
    line.stream.start(line.write)
    await line.say(300)
    line.takes = False
    await line.say(301)
    await line.say(302)
    sent = await anext(line.stream)
    assert contents(sent) == [text_of(301), text_of(302)]
    line.takes = True
    await line.say(303)  # while what was taken is still on its way
    assert contents(b"".join(line.written)) == [text_of(300)]
    assert contents(await anext(line.stream)) == [text_of(303)]
    waiting = asyncio.ensure_future(anext(line.stream, None))
    await asyncio.sleep(0)
    await line.say(304)
    assert contents(line.written[-1]) == [text_of(304)]
    line.handle.publish(END, 0.0)
    assert await waiting is None


async def test_without_a_way_to_write_at_once_every_frame_waits() -> None:
    line = Line()
    line.stream.start(None)
    for event in (Tokens(token_ids=(300,)), END):
        line.handle.publish(event, 0.0)
    frames = b"".join([data async for data in line.stream])
    assert contents(frames) == [text_of(300)]
    assert frames.count(b'"finish_reason":"length"') == 1
    assert frames.endswith(b"data: [DONE]\n\n")


async def test_a_fault_of_the_writer_ends_the_stream_and_its_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line()

    def broken(delta: ChoiceDelta) -> bytes:
        raise ArithmeticError(delta)

    monkeypatch.setattr(line.writer, "output", broken)
    line.stream.start(line.write)
    await line.say(300)
    assert [data async for data in line.stream] == []
    assert line.handle.cancelled
    assert line.written[-1].count(b'"error"') == 1
    assert line.written[-1].endswith(b"data: [DONE]\n\n")


async def test_a_stream_is_kept_alive_only_while_it_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line()
    response = FrameResponse(line.stream, keepalive_s=10.0, send_timeout_s=30.0)
    now_s, last_chunk_s = 100.0, 125.0
    line.stream.last_sent_s = now_s
    sent_s: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        assert seconds > 0
        now_s += seconds
        if now_s <= last_chunk_s:  # a chunk every second
            line.stream.last_sent_s = now_s // 1

    async def send(message: Message) -> None:
        assert message["body"] == b": keep-alive\n\n"
        sent_s.append(now_s)
        response.active = len(sent_s) < 3

    monkeypatch.setattr("gateway.stream.time.monotonic", lambda: now_s)
    monkeypatch.setattr("gateway.stream.asyncio.sleep", sleep)
    await response._ping(send)
    assert sent_s == [130.0, 140.0, 150.0]


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("chunks", [ChatChunks(None), CompletionChunks(None, ("",))])
@pytest.mark.parametrize("text", ["sample", '"\\\n', "\u00e9\u4e16\U0001f600", "\x00</x>"])
def test_plain_text_is_spelled_like_any_other_output(
    chunks: ChunkWriter, include_usage: bool, text: str
) -> None:
    generation = Generation(
        [], lambda request, leader: make_handle(request), counts_reasoning=False
    )
    writer = frames_of(generation, chunks, include_usage=include_usage)
    delta = ChoiceDelta(index=3, content=text)
    chunk = orjson.loads(writer.output(delta).removeprefix(b"data: "))
    assert chunk["choices"] == [chunks.output(delta)]
    assert chunk["model"] == "sample"
    assert chunk.get("usage", "none") == (None if include_usage else "none")
