"""Anthropic's messages: the official client against a live server, and the events on the wire."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from engine.fake import FakeEngine, FakeScript, Fault, FaultKind
from gateway.config import ApiKey, GatewayConfig
from gateway.messages_wire import parse_message
from gateway.preparation import Preparer
from tests.conformance.live import MODEL, chat_body, default_files, ids_of, live_server, says

if TYPE_CHECKING:
    from anthropic.types import MessageParam, ToolParam

    from tests.conformance.live import Live

PATH = "/v1/messages"
HELLO: list[MessageParam] = [{"role": "user", "content": "Hello"}]
TOOL: ToolParam = {
    "name": "get_weather",
    "description": "Weather of a place.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLS = (
    "<think>\nWhere?\n</think>\n\nLet me look.\n\n"
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nÅlesund\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "</function>\n</tool_call>"
)


def client_of(live: Live, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=live.url,
        api_key=key,
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
    )


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "max_tokens": 100, "messages": HELLO, **fields}


def events_of(raw: str) -> list[dict[str, Any]]:
    """The events of a stream, its framing checked."""
    events: list[dict[str, Any]] = []
    assert raw.endswith("\n\n")
    for frame in raw.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def test_a_message_whole_and_streamed() -> None:
    async with live_server(says("Hello, wörld!")) as live, client_of(live) as client:
        answer = await client.messages.create(
            model=MODEL, max_tokens=50, system="Be brief.", messages=HELLO
        )
        (block,) = answer.content
        assert block.type == "text"
        assert block.text == "Hello, wörld!"
        assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "end_turn")
        assert answer.stop_sequence is None
        assert answer.usage.output_tokens == len(ids_of("Hello, wörld!"))
        async with client.messages.stream(
            model=MODEL,
            max_tokens=50,
            system=[{"type": "text", "text": "Be brief."}],
            messages=HELLO,
        ) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Hello, wörld!"
            final = await stream.get_final_message()
        content: Any = final.to_dict()["content"]
        assert [item["text"] for item in content] == ["Hello, wörld!"]
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens == answer.usage.output_tokens
        prompt_tokens = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        assert (
            final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == prompt_tokens
        )
        count = await client.messages.count_tokens(model=MODEL, system="Be brief.", messages=HELLO)
        assert count.input_tokens == prompt_tokens


@pytest.mark.parametrize("spec", [0, 4])
async def test_thoughts_and_calls_are_blocks(spec: int) -> None:
    async with live_server(says(CALLS)) as live, client_of(live) as client:
        extra = {"spec": spec}
        answer = await client.messages.create(
            model=MODEL, max_tokens=300, messages=HELLO, tools=[TOOL], extra_body=extra
        )
        async with client.messages.stream(
            model=MODEL, max_tokens=300, messages=HELLO, tools=[TOOL], extra_body=extra
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_message()
    assert answer.stop_reason == final.stop_reason == "tool_use"
    for message in (answer, final):
        content: Any = message.to_dict()["content"]
        kinds = [block["type"] for block in content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        thought, text, first, second = content
        assert thought["thinking"] == "Where?"
        assert text["text"] == "Let me look."
        assert first["name"] == "get_weather"
        assert (first["input"], second["input"]) == ({"city": "Ålesund"}, {"city": "Oslo"})
        assert first["id"] != second["id"]


async def test_the_events_come_in_order_and_blocks_do_not_overlap() -> None:
    async with live_server(says(CALLS)) as live:
        response = await live.client.post(
            PATH, json=body(tools=[TOOL], stream=True, max_tokens=300)
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    is_open, index = False, -1
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open, index = True, index + 1
            case "content_block_stop":
                assert is_open
                is_open = False
            case kind:
                assert kind == "content_block_delta"
                assert is_open
        assert event["index"] == index
    assert index == 3
    assert not is_open


async def test_text_after_a_call_is_a_block_behind_it() -> None:
    call = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    tool = {"name": "f", "input_schema": {"type": "object"}}
    async with live_server(says(f"One.\n{call}\nTwo.")) as live:
        for spec in (0, 4):
            fields = body(tools=[tool], spec=spec)
            content = (await live.client.post(PATH, json=fields)).json()["content"]
            assert [block["type"] for block in content] == ["text", "tool_use", "text"]
            assert content[1]["input"] == {}
            assert content[2]["text"] == "Two."


async def test_why_it_stopped() -> None:
    async with live_server(says("one two three four five six")) as live:
        cut = (await live.client.post(PATH, json=body(max_tokens=2))).json()
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
        stop = body(stop_sequences=["never", " four"])
        stopped = (await live.client.post(PATH, json=stop)).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " four")
        assert stopped["content"][0]["text"] == "one two three"
        streamed = await live.client.post(PATH, json={**stop, "stream": True})
        assert events_of(streamed.text)[-2]["delta"] == {
            "stop_reason": "stop_sequence",
            "stop_sequence": " four",
        }


async def test_a_stop_string_leaves_the_counts_of_cache_and_drafts() -> None:
    async with live_server(says("one two three four five six")) as live:
        fields = chat_body("Hello " * 100, stop=" five")
        await live.client.post("/v1/chat/completions", json=fields)
        usage = (await live.client.post("/v1/chat/completions", json=fields)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


async def test_a_conversation_is_the_prompt_that_chat_makes_of_it() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Where?", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "Rain."}],
                },
                {"type": "text", "text": "And tomorrow?"},
            ],
        },
    ]
    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "reasoning_content": "Where?",
            "content": "Let me look.",
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
        {"role": "user", "content": "And tomorrow?"},
    ]
    async with live_server(says("ok")) as live:
        counted = await live.client.post(
            f"{PATH}/count_tokens",
            json={"model": MODEL, "system": "Be brief.", "messages": messages},
        )
        asked = await live.client.post(
            "/v1/chat/completions", json=chat_body(messages=chat, enable_thinking=False)
        )
    assert counted.json()["input_tokens"] == asked.json()["usage"]["prompt_tokens"]


async def test_thinking_is_off_unless_asked_for() -> None:
    async with live_server(says("Hm.\n</think>\n\nYes.")) as live:
        on = await live.client.post(PATH, json=body(thinking={"type": "adaptive"}))
        assert [block["type"] for block in on.json()["content"]] == ["thinking", "text"]
        off = (await live.client.post(PATH, json=body())).json()
        assert off["content"][0]["text"].startswith("Hm.")


@pytest.mark.parametrize(
    ("fields", "thinks", "budget"),
    [
        ({}, False, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "adaptive"}}, True, None),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, True, 1),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, True, 2048),
        # What the extras of this server say wins.
        ({"enable_thinking": True}, True, None),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, None),
        (
            {"enable_thinking": True, "thinking": {"type": "enabled", "budget_tokens": 9}},
            True,
            9,
        ),
        ({"thinking": {"type": "adaptive"}, "thinking_budget": 7}, True, 7),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, True, None),
    ],
)
def test_what_thinking_becomes(fields: dict[str, object], thinks: bool, budget: int | None) -> None:
    request = parse_message(json.dumps(body(**fields)).encode())
    preparer = Preparer(default_files(), FakeEngine(FakeScript()).info)
    (prepared,) = asyncio.run(preparer.chat(request, request_id="r", owner=""))
    assert prepared.in_thought is thinks
    thought = prepared.request.sampling.thought
    assert (None if thought is None else thought.budget) == budget
    if thought is not None:
        assert thought.is_open
        opening = default_files().encoder.encode_plain("\n</think>\n\n", parse_special=True)
        assert thought.closing_ids == opening


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_budget": 6},
            "thinking_budget",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"metadata": {"user_id": 3}}, "metadata.user_id"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"compaction": {"enabled": True}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"regex": "a"}, "regex"),
        ({"stream": "yes"}, "stream"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_wrong_bodies_are_refused_by_the_clients_own_names(
    live: Live, fields: dict[str, object], param: str
) -> None:
    response = await live.client.post(PATH, json=body(**fields))
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(param)


async def test_errors_are_the_clients_own_classes() -> None:
    config = GatewayConfig(port=0, api_keys=(ApiKey(name="ann", secret="right"),))
    async with live_server(FakeScript(), config=config) as live:
        async with client_of(live, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
        async with client_of(live, "right") as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="claude-9", max_tokens=1, messages=HELLO)
            with pytest.raises(anthropic.BadRequestError, match="context"):
                await client.messages.create(model=MODEL, max_tokens=9999, messages=HELLO)
        missing = await live.client.get("/v1/messages/nowhere", headers={"x-api-key": "right"})
        assert missing.json()["error"]["type"] == "not_found_error"


async def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    script = FakeScript(faults=(Fault(window=3, kind=FaultKind.SLOT, slot=0),))
    async with live_server(script) as live:
        response = await live.client.post(PATH, json=body(stream=True, ignore_eos=True))
        last = events_of(response.text)[-1]
        assert last["type"] == "error"
        assert last["error"]["type"] == "api_error"


async def test_a_silent_stream_is_kept_alive_by_pings() -> None:
    config = GatewayConfig(port=0, keepalive_s=0.05)
    async with live_server(says("late", prompt_token_s=0.02), config=config) as live:
        response = await live.client.post(PATH, json=body(stream=True))
    kinds = [event["type"] for event in events_of(response.text)]
    assert kinds.count("ping") >= 3
