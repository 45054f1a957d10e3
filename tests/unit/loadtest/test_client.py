"""Every request ends with exactly one outcome, whatever the server does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from loadtest.client import Outcome, RequestPlan, RequestRecord, send
from tests.unit.loadtest.virtual import (
    Script,
    ScriptedServer,
    Unreachable,
    client,
    frame,
    run,
    steady,
    text_frame,
)

BODY = json.dumps({"model": "m", "messages": []}).encode()
STOP = frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
DONE = b"data: [DONE]\n\n"


def ask(transport: httpx.AsyncBaseTransport, **plan: Any) -> RequestRecord:
    async def main() -> RequestRecord:
        async with client(transport) as http:
            request = RequestPlan(body=BODY, **plan)
            return await send(http, request, intended_start_s=0.0, timeout_s=60.0)

    return run(main())


def answer(*pieces: bytes, **script: Any) -> ScriptedServer:
    parts = [(0.1, piece) for piece in pieces]
    return ScriptedServer(lambda _: Script(pieces=parts, **script))


def test_ok_carries_text_usage_and_reason() -> None:
    server = ScriptedServer(lambda _: steady(ttft_s=1, itl_s=1, num_chunks=3))
    record = ask(server)
    assert (record.outcome, record.status, record.expected) == (Outcome.OK, 200, True)
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
    assert (record.text, record.finish_reason) == ("x x x ", "stop")
    assert record.usage_agrees is True


def test_http_error_keeps_status_body_and_retry_after() -> None:
    server = answer(b'{"error": {}}', status=429, retry_after="3")
    record = ask(server, expected=("http_error 429",))
    assert (record.outcome, record.label) == (Outcome.HTTP_ERROR, "http_error 429")
    assert (record.expected, record.retry_after, record.error) == (True, "3", '{"error": {}}')


def test_error_event_is_a_stream_error() -> None:
    error = {"error": {"message": "engine died", "code": "engine_dead"}}
    record = ask(answer(text_frame("a"), frame(error), DONE))
    assert (record.outcome, record.expected) == (Outcome.STREAM_ERROR, False)
    assert (record.error_code, record.label) == ("engine_dead", "stream_error engine_dead")
    assert "engine died" in record.error


@pytest.mark.parametrize("breaks", [False, True])
def test_a_stream_without_done_is_a_stream_error(breaks: bool) -> None:
    assert ask(answer(text_frame("a"), STOP, breaks=breaks)).outcome is Outcome.STREAM_ERROR


def test_the_body_is_read_to_its_end_so_that_the_connection_is_kept() -> None:
    server = ScriptedServer(
        lambda _: Script(pieces=[(1.0, text_frame("a") + STOP + DONE), (2.0, b"")])
    )
    record = ask(server)
    assert (record.outcome, record.end_s, server.bodies_read) == (Outcome.OK, 1.0, 1)
    assert ask(answer(text_frame("a"), STOP, DONE, text_frame("b"))).outcome is Outcome.MALFORMED


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"code": "queue_full", "type": "rate_limit_error"}}', "queue_full"),
        (b'{"error": {"code": null, "type": "server_error"}}', "server_error"),
        (b'{"error": "no"}', None),
        (b"<html>", None),
    ],
)
def test_the_code_of_an_error_is_read_if_there_is_one(body: bytes, code: str | None) -> None:
    assert ask(answer(body, status=500)).error_code == code


def test_a_stream_cut_short_has_the_usage_that_its_chunks_said() -> None:
    chunk = {
        "choices": [{"index": 0, "delta": {"content": "a"}}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
    }
    record = ask(answer(frame(chunk), breaks=True))
    assert (record.outcome, record.prompt_tokens) == (Outcome.STREAM_ERROR, 4)
    assert record.completion_tokens == 3


def test_reasoning_is_kept_apart_from_text() -> None:
    thought = frame({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
    record = ask(answer(thought, text_frame("a"), STOP, DONE))
    assert (record.reasoning, record.text, len(record.chunk_times_s)) == ("hm", "a", 2)


def test_no_connection() -> None:
    record = ask(Unreachable())
    assert (record.outcome, record.status) == (Outcome.CONNECTION, None)


def test_timeout_ends_a_silent_stream() -> None:
    record = ask(ScriptedServer(lambda _: Script(pieces=[(1000.0, b"")])))
    assert (record.outcome, record.end_s) == (Outcome.TIMEOUT, 60.0)


@pytest.mark.parametrize(
    "server",
    [
        answer(b"data: {not json\n\n"),
        answer(b"data: [1]\n\n"),
        answer(b"hello\n\n"),
        answer(frame({"object": "chunk"})),
        answer(text_frame("a"), DONE),
        answer(b"{}", content_type="application/json"),
    ],
    ids=["json", "list", "not sse", "no choices", "no finish_reason", "content type"],
)
def test_malformed(server: ScriptedServer) -> None:
    assert ask(server).outcome is Outcome.MALFORMED


@pytest.mark.parametrize(("chunks", "seen"), [(0, 0), (2, 2)])
def test_a_client_leaves_after_so_many_chunks(chunks: int, seen: int) -> None:
    server = ScriptedServer(lambda _: steady(ttft_s=1, itl_s=1, num_chunks=5))
    record = ask(server, disconnect_after_chunks=chunks, expected=(Outcome.DISCONNECTED,))
    assert (record.outcome, record.expected) == (Outcome.DISCONNECTED, True)
    assert len(record.chunk_times_s) == seen


def test_events_may_be_split_anywhere_and_end_in_crlf() -> None:
    whole = (text_frame("ä") + b": keep-alive\n\n" + STOP + DONE).replace(b"\n", b"\r\n")
    usage = frame({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    whole = usage + whole
    record = ask(answer(*(whole[i : i + 1] for i in range(len(whole)))))
    assert (record.outcome, record.text) == (Outcome.OK, "ä")


def test_usage_below_the_number_of_chunks_disagrees() -> None:
    usage = frame({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    record = ask(answer(text_frame("a"), text_frame("b"), STOP, usage, DONE))
    assert record.usage_agrees is False
    assert ask(answer(text_frame("a"), STOP, DONE)).usage_agrees is False


def test_a_whole_answer_is_read_without_a_stream() -> None:
    payload = {
        "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    record = ask(answer(json.dumps(payload).encode()), stream=False)
    assert (record.outcome, record.text, record.ttft_s) == (Outcome.OK, "hi", None)
    assert record.usage_agrees is None


def test_cancellation_goes_on_up() -> None:
    server = ScriptedServer(lambda _: Script(pieces=[(10.0, b"")]))

    async def main() -> None:
        async with client(server) as http:
            request = RequestPlan(body=BODY)
            task = asyncio.create_task(send(http, request, intended_start_s=0.0, timeout_s=60.0))
            await asyncio.sleep(1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
