"""Mistakes that servers of drafting engines are known for, each with a test that shows it.

A chain of drafts lands at once: up to five tokens of which some may be too many, and with them a stop, the end of a
call and the cap on the length. CHAINS moves where chains end along the text. Two more need real logits and are tested
with the engine: a mask in whose chain the thought ends (tests/oracle/test_engine_grammar.py), and penalties that see
every token of a chain (tests/oracle/test_engine_sampling.py).
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.fake import FakeScript
from gateway.config import ApiKey, GatewayConfig
from gateway.limits import KeyLimits
from gateway.tracing import open_tracer
from tests.conformance.live import MODEL, chat_body, default_files, ids_of, live_server, says
from tests.conformance.test_chat import CALLS, TOOL, USAGE, stream, whole
from tests.conformance.test_messages import events_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conformance.live import Live

CHAINS = [(4,), (2, 4)]
"""Accepted drafts of the windows: from the second on five tokens land at once."""
TEXT = "one two three four five six"
MIXED = "a 😀 wörld, 漢字 🙃"


def num_tokens_to(end: str, text: str = TEXT) -> int:
    """Tokens of the text up to the one that completes the first `end`."""
    ids, length = ids_of(text), text.index(end) + len(end)
    return next(n for n in range(len(ids)) if len(default_files().decode(ids[:n])) >= length)


def joined(entries: list[dict[str, Any]]) -> bytes:
    """The text of logprob entries."""
    return b"".join(bytes(entry["bytes"]) for entry in entries)


async def both(live: Live, **fields: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """One chat whole and streamed, as (message, logprobs, finish, usage) each."""
    answer = await whole(live, logprobs=True, **fields)
    (choice,) = answer["choices"]
    result = await stream(live, logprobs=True, stream_options=USAGE, **fields)
    told = {
        "content": choice["message"]["content"] or "",
        "reasoning": choice["message"].get("reasoning_content", ""),
        "calls": [call["function"] for call in choice["message"].get("tool_calls", [])],
        "entries": choice["logprobs"]["content"] or [],
        "finish": [choice["finish_reason"]],
        "tokens": answer["usage"]["completion_tokens"],
    }
    calls: dict[int, dict[str, str]] = {}
    for piece in (p for c in result.choices() for p in c["delta"].get("tool_calls", [])):
        call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
        for key in call:
            call[key] += piece["function"].get(key, "")
    streamed = {
        "content": result.text(),
        "reasoning": result.text("reasoning_content"),
        "calls": list(calls.values()),
        "entries": [
            entry
            for choice in result.choices()
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ],
        "finish": result.finish_reasons(),
        "tokens": result.chunks[-1]["usage"]["completion_tokens"],
    }
    return told, streamed


@pytest.mark.parametrize("accepted", CHAINS)
async def test_a_length_cap_does_not_hide_a_stop_of_the_same_chain(
    accepted: tuple[int, ...],
) -> None:
    async with live_server(says(TEXT, accepted=accepted)) as live:
        for stop, num_tokens, text in (
            (None, len(ids_of(TEXT)), TEXT),
            (["four"], num_tokens_to("four"), "one two three "),
        ):
            for cap in range(num_tokens - 1, num_tokens + 5):
                for told in await both(live, stop=stop, max_tokens=cap):
                    assert told["tokens"] == min(cap, num_tokens)
                    if cap >= num_tokens:
                        assert (told["finish"], told["content"]) == (["stop"], text)
                    else:
                        assert told["finish"] == ["length"]


@pytest.mark.parametrize("accepted", CHAINS)
async def test_neither_tokens_nor_logprobs_are_kept_past_the_stop(
    accepted: tuple[int, ...],
) -> None:
    ids = ids_of(TEXT)
    async with live_server(says(TEXT, accepted=accepted)) as live:
        for num_shown in range(1, len(ids) - 1, 2):
            text = default_files().decode(ids[:num_shown])
            for told in await both(live, stop_token_ids=[ids[num_shown]]):
                assert (told["content"], told["finish"]) == (text, ["stop"])
                assert joined(told["entries"]) == text.encode()
                assert told["tokens"] == num_shown + 1
        for stop in (" two", " three", " four", " five"):
            text = TEXT[: TEXT.index(stop)]
            for told in await both(live, stop=stop):
                assert (told["content"], told["finish"]) == (text, ["stop"])
                assert joined(told["entries"]) == text.encode()
                assert told["tokens"] == num_tokens_to(stop)
            raw = {"model": MODEL, "prompt": "x", "max_tokens": 40, "logprobs": 1, "stop": stop}
            answer = (await live.client.post("/v1/completions", json=raw)).json()
            (choice,) = answer["choices"]
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == text
            assert answer["usage"]["completion_tokens"] == num_tokens_to(stop)


@pytest.mark.parametrize("accepted", CHAINS)
async def test_as_many_tokens_are_delivered_as_usage_says(accepted: tuple[int, ...]) -> None:
    """Characters of several tokens that a chain or the cap cuts in two among them."""
    ids = ids_of(MIXED)
    async with live_server(says(MIXED, accepted=accepted)) as live:
        for cap in range(1, len(ids) + 2):
            # Half of a stop string at the end: its tokens are held back until nothing more comes.
            for told in await both(live, max_tokens=cap, stop=["🙃!"] if cap % 2 else None):
                shown = ids[: min(cap, len(ids) - 1)]
                assert told["tokens"] == min(cap, len(ids))
                assert len(told["entries"]) == len(shown)
                assert told["content"] == default_files().decode(shown)
                if cap >= len(ids):
                    assert joined(told["entries"]) == MIXED.encode()


@pytest.mark.parametrize("accepted", CHAINS)
async def test_arguments_are_not_doubled_when_a_call_ends_with_its_chain(
    accepted: tuple[int, ...],
) -> None:
    """Also of calls that the cap leaves open at any place: the stream tells what the whole answer tells."""
    calls = [
        {"name": "get_weather", "arguments": '{"city":"Ålesund"}'},
        {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
    ]
    async with live_server(says(CALLS, accepted=accepted)) as live:
        # Text that may become a stop string is held back, and the last call ends in the final flush.
        for stop in (None, "</function>\n</tool_call>!"):
            told, streamed = await both(live, tools=[TOOL], stop=stop)
            assert told["calls"] == streamed["calls"] == calls
            assert streamed["finish"] == ["tool_calls"]
        # A stop string that comes with the call's end, or in its place.
        for stop in ("\n</tool_call>", "</function>"):
            for told in await both(live, tools=[TOOL], stop=stop):
                assert (told["calls"], told["finish"]) == (calls[:1], ["tool_calls"])
        length = len(ids_of(CALLS))
        for cap in (*range(length - 45, length - 9, 6), *range(length - 9, length)):
            told, streamed = await both(live, tools=[TOOL], max_tokens=cap)
            assert told == streamed
            for call, known in zip(told["calls"], calls, strict=False):
                assert call["name"] == "get_weather"
                assert json.loads(call["arguments"]) in (json.loads(known["arguments"]), {})


async def test_every_choice_ends_under_its_own_index() -> None:
    """Choices of three prompts that end in different windows and for different reasons."""
    prompts, seeds = ["a", "b", "c"], 2
    async with live_server(FakeScript(accepted=(4, 0, 2))) as live:
        fields = {"model": MODEL, "max_tokens": 40, "seed": 4, "logprobs": 0, "ignore_eos": True}
        alone: list[dict[str, Any]] = []
        for prompt in prompts:
            body = {**fields, "prompt": prompt, "n": seeds}
            alone += (await live.client.post("/v1/completions", json=body)).json()["choices"]
        # A stop id that some of them meet: two tokens of two choices, at different places.
        names = [choice["logprobs"]["tokens"] for choice in alone]
        stops = [names[1][7], names[4][20]]
        stop_ids = [
            default_files().encoder.encode_plain(stop, parse_special=True)[0] for stop in stops
        ]
        body = {**fields, "prompt": prompts, "n": seeds, "stop_token_ids": stop_ids}
        answer = (await live.client.post("/v1/completions", json=body)).json()
        raw = (await live.client.post("/v1/completions", json={**body, "stream": True})).text
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    chunks = [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]
    pieces = [piece for chunk in chunks for piece in chunk["choices"]]
    for choice, plain in zip(choices, alone, strict=True):
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert plain["text"].startswith(choice["text"])
        ends = [piece["finish_reason"] for piece in own if piece["finish_reason"]]
        assert ends == [choice["finish_reason"]]
        assert own[-1]["finish_reason"] is not None
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}


MEGABYTE = "y" * 2**20
BIG: Sequence[tuple[str, object]] = [
    (path, body)
    for path in ("chat/completions", "completions", "responses", "messages")
    for body in (
        {"model": MEGABYTE, "messages": [], "prompt": "x", "input": "x", "max_tokens": 1},
        {"model": MODEL, "messages": MEGABYTE, "prompt": {MEGABYTE: 1}, "input": {MEGABYTE: 1}},
        {"model": MODEL, "messages": [{"role": MEGABYTE}], "prompt": 1, "input": [{"type": MEGABYTE}]},
        {**chat_body(), "prompt": "x", "input": "x", "max_tokens": MEGABYTE, "max_output_tokens": MEGABYTE},
        {**chat_body(), "prompt": "x", "input": "x", "max_tokens": 9, "tools": [{"type": MEGABYTE}]},
        {**chat_body(), "prompt": "x", "input": "x", "max_tokens": 9, "tools": {MEGABYTE: MEGABYTE}},
        [MEGABYTE],
        MEGABYTE,
    )
] + [
    ("chat/completions", chat_body(**fields))
    for fields in (
        {"response_format": {"type": MEGABYTE}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": MEGABYTE}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": MEGABYTE}}}},
        {"structured_outputs": {"regex": f"({MEGABYTE}"}},
        {"structured_outputs": {"grammar": f"root ::= {MEGABYTE}"}},
        {"logit_bias": {MEGABYTE: 1}},
        {"chat_template_kwargs": {MEGABYTE: MEGABYTE}, "temperature": MEGABYTE},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": MEGABYTE}}},
        {"reasoning_effort": MEGABYTE},
    )
]  # fmt: skip


async def test_a_megabyte_that_is_refused_is_not_sent_back() -> None:
    """Neither its values nor its keys, nor bytes that are no JSON, by any path."""
    async with live_server(FakeScript()) as live:
        paths = ("chat/completions", "completions", "responses", "messages")
        bodies = [(path, json.dumps(body).encode()) for path, body in BIG]
        bodies += [(path, MEGABYTE.encode()) for path in paths]
        bodies += [(path, b'{"model": "' + MEGABYTE.encode()) for path in paths]
        for path, content in bodies:
            response = await live.client.post(
                f"/v1/{path}", content=content, headers={"content-type": "application/json"}
            )
            assert 400 <= response.status_code < 500, (path, content[:60])
            assert len(response.content) < 1000, (path, content[:60])
        assert (await whole(live, max_tokens=1))["usage"]["completion_tokens"] == 1


def leaving_config() -> GatewayConfig:
    """Every middleware that there is, with every limit."""
    return GatewayConfig(
        port=0,
        host="127.0.0.1",
        api_keys=(
            ApiKey(
                name="ann",
                secret="key",
                limits=KeyLimits(requests_per_min=100, tokens_per_min=1_000_000, max_concurrent=50),
            ),
        ),
        cors_origins=("https://chat.example",),
        allowed_hosts=("localhost",),
        keepalive_s=0.02,
    )


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"max_tokens": 4000, "ignore_eos": True}),
        ("completions", {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}),
        ("responses", {"input": "x", "max_output_tokens": 4000}),
        ("messages", {"max_tokens": 4000}),
    ],
)
async def test_a_client_that_leaves_is_out_of_its_slot_within_one_window(
    path: str, fields: dict[str, object], streamed: bool
) -> None:
    """No middleware keeps the news from whoever must hear it. A window is long here beside the way of the news."""
    tracer = open_tracer("http://127.0.0.1:9", "t", SimpleSpanProcessor(InMemorySpanExporter()))
    script = FakeScript(decode_s=0.15)
    async with live_server(script, config=leaving_config(), tracer=tracer) as live:
        content = json.dumps({**chat_body(**fields), "stream": streamed}).encode()
        connection = socket.create_connection(live.address)
        connection.sendall(
            b"POST /v1/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer key\r\nOrigin: https://chat.example\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(content), content)
        )
        await live.wait_busy()
        await asyncio.sleep(0.2)
        before = live.scheduler.stats().totals
        connection.close()
        await live.wait_idle()
        # The window that was running, and at the very end of one the next that had begun.
        assert live.scheduler.stats().totals.windows - before.windows <= 2
        assert before.completion_tokens > 0
    tracer.close()


ANSWERS = {
    "thought": "<think>\nLet me see 😀.\n</think>\n\nThe answer is 42, wörld.",
    "calls": CALLS,
    "text": MIXED,
}


@pytest.mark.parametrize("answer", sorted(ANSWERS))
async def test_chains_of_any_length_give_the_same_message(answer: str) -> None:
    """Whole and streamed, by every API: text, thought, calls, log-probabilities, finish and count."""
    fields: dict[str, object] = {"tools": [TOOL], "seed": 5}
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    tool = {"name": "get_weather", "input_schema": {"type": "object"}}
    async with live_server(says(ANSWERS[answer], accepted=(4,))) as live:
        chats = [told for n in range(5) for told in await both(live, spec=n, **fields)]
        assert all(told == chats[0] for told in chats)
        for path, body in (
            ("responses", {"model": MODEL, "input": "Hi", "tools": [{"type": "function", **function}]}),
            ("messages", {**chat_body(), "max_tokens": 200, "tools": [tool]}),
        ):  # fmt: skip
            told = [await assembled(live, path, {**body, "spec": n}) for n in range(5)]
            assert all(one == told[0] for one in told)


async def assembled(live: Live, path: str, body: dict[str, object]) -> tuple[object, list[str]]:
    """An answer without its ids and times, and the text of the same as a stream, by kind of delta."""
    response = await live.client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    parts = answer["output"] if path == "responses" else answer["content"]
    kept = [{k: v for k, v in part.items() if k not in ("id", "call_id")} for part in parts]
    response = await live.client.post(f"/v1/{path}", json={**body, "stream": True})
    texts: dict[str, str] = {}
    for event in events_of(response.text):
        delta = event.get("delta")
        fields = delta if isinstance(delta, dict) else {event["type"]: delta}
        for key, value in fields.items():
            if isinstance(value, str) and key != "type":
                texts[key] = texts.get(key, "") + value
    return kept, sorted(f"{key}={value}" for key, value in texts.items())
