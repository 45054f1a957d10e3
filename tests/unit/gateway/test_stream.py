from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gateway.generation import Choice, Generation
from gateway.metrics import Meter, Metrics
from gateway.preparation import PreparedChoice
from gateway.replies import ReplyHead
from gateway.stream import ChatChunks, ChunkFrames, FrameResponse, FrameStream
from gateway.wire import StreamOptions
from scheduler.errors import Overloaded
from scheduler.handle import RequestHandle
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
    frames = FrameStream(generation, writer, Meter(Metrics(no_stats), "chat", lambda: 0.0))
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
