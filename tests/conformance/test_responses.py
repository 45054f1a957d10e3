"""OpenAI's responses, stateless: the official client against a live server, and the events on the wire."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from engine.fake import FakeScript, Fault, FaultKind
from tests.conformance.live import MODEL, chat_body, ids_of, live_server, says
from tests.conformance.test_messages import CALLS, events_of
from tests.conformance.test_openai_client import client_of

if TYPE_CHECKING:
    from openai.types.responses import FunctionToolParam

    from tests.conformance.live import Live

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
TOOL: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "input": "Hello", **fields}


async def test_a_response_whole_and_streamed() -> None:
    async with live_server(says("Hello, wörld!")) as live, client_of(live) as client:
        answer = await client.responses.create(
            model=MODEL, input="Hello", instructions="Be brief.", metadata={"a": "b"}
        )
        assert answer.output_text == "Hello, wörld!"
        assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
        assert answer.instructions == "Be brief."
        assert answer.metadata == {"a": "b"}
        assert answer.previous_response_id is None
        assert answer.to_dict()["store"] is False
        assert answer.usage is not None
        assert answer.usage.output_tokens == len(ids_of("Hello, wörld!"))
        async with client.responses.stream(
            model=MODEL, input=[{"role": "user", "content": "Hello"}], instructions="Be brief."
        ) as stream:
            text = "".join(
                [
                    event.delta
                    async for event in stream
                    if event.type == "response.output_text.delta"
                ]
            )
            final = await stream.get_final_response()
        assert text == final.output_text == "Hello, wörld!"
        assert final.status == "completed"
        assert final.usage is not None
        assert final.usage.total_tokens == answer.usage.total_tokens


@pytest.mark.parametrize("spec", [0, 4])
async def test_thoughts_texts_and_calls_are_items(spec: int) -> None:
    async with live_server(says(CALLS)) as live, client_of(live) as client:
        extra = {"spec": spec}
        answer = await client.responses.create(
            model=MODEL, input="Hello", tools=[TOOL], extra_body=extra
        )
        async with client.responses.stream(
            model=MODEL, input="Hello", tools=[TOOL], extra_body=extra
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
    for response in (answer, final):
        assert response.output_text == "Let me look."
        output: Any = response.to_dict()["output"]
        kinds = [item["type"] for item in output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        thought, _, first, second = output
        assert thought["content"][0]["text"] == "Where?"
        assert first["name"] == "get_weather"
        assert json.loads(first["arguments"]) == {"city": "Ålesund"}
        assert json.loads(second["arguments"]) == {"city": "Oslo"}
        assert first["call_id"] != second["call_id"]


async def test_the_events_are_numbered_and_items_do_not_overlap() -> None:
    async with live_server(says(CALLS)) as live:
        response = await live.client.post(PATH, json=body(tools=[TOOL], stream=True))
        events = events_of(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    items: list[dict[str, Any]] = []
    grown = ""
    for event in events[2:-1]:
        assert event["output_index"] == len(items)
        match event["type"].removeprefix("response.").split("."):
            case ["output_item", "added"]:
                grown = ""
            case ["output_item", "done"]:
                items.append(event["item"])
            case [_, "delta"]:
                grown += event["delta"]
            case [_, "done"] if "text" in event or "arguments" in event:
                assert grown == event.get("text", event.get("arguments"))
            case _:
                pass
    assert items == last["response"]["output"]


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with live_server(says("one two three four five six")) as live:
        fields = body(max_output_tokens=2)
        whole = (await live.client.post(PATH, json=fields)).json()
        assert whole["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert whole["output"][0]["status"] == "incomplete"
        streamed = await live.client.post(PATH, json={**fields, "stream": True})
        done, last = events_of(streamed.text)[-2:]
        assert last["type"] == "response.incomplete"
        assert done["item"]["status"] == "incomplete"


async def test_a_conversation_is_the_prompt_that_chat_makes_of_it() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "1", "summary": [], "content": [{"text": "Where?"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {
            "type": "function_call",
            "call_id": "1",
            "name": "get_weather",
            "arguments": '{"city": "Oslo"}',
        },
        {"type": "function_call_output", "call_id": "1", "output": "Rain."},
        {"type": "message", "role": "user", "content": "And tomorrow?"},
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
        asked = await live.client.post(PATH, json=body(input=items, instructions="Be brief."))
        chatted = await live.client.post("/v1/chat/completions", json=chat_body(messages=chat))
    assert asked.json()["usage"]["input_tokens"] == chatted.json()["usage"]["prompt_tokens"]


SAYS = (
    "<think>\nWhere?\n</think>\n\nLet mé look 😀 <tool_cal x" + CALLS[CALLS.index("<tool_call>") :]
)


@pytest.mark.parametrize("spec", [0, 4])
async def test_logprobs_are_those_of_the_text(spec: int) -> None:
    async with live_server(says(SAYS)) as live, client_of(live) as client:
        asked: Any = {
            "model": MODEL,
            "input": "Hello",
            "tools": [TOOL],
            "include": [LOGPROBS],
            "top_logprobs": 2,
            "extra_body": {"spec": spec},
        }
        answer = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events: list[Any] = [event.to_dict(warnings=False) async for event in stream]
            final = await stream.get_final_response()
        plain = await client.responses.create(model=MODEL, input="Hello", tools=[TOOL])
    text = "Let mé look 😀 <tool_cal x"
    parts: list[Any] = [
        response.to_dict()["output"][1]["content"][0]  # type: ignore[index]
        for response in (answer, final)
    ]
    logprobs = parts[0]["logprobs"]
    assert parts[1]["logprobs"] == logprobs
    # The first token may have the line ends behind the thought as well.
    said = bytes(byte for entry in logprobs for byte in entry["bytes"]).decode()
    assert said.strip() == text
    for entry in logprobs:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta] == logprobs
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == logprobs
    assert answer.to_dict()["top_logprobs"] == 2
    unasked: Any = plain.to_dict()["output"]
    assert unasked[1]["content"][0]["logprobs"] == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"instructions": 3}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
        ({"include": [LOGPROBS], "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": {"effort": "none"}, "enable_thinking": True}, "reasoning.effort"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"background_options": {}}, "background_options"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"metadata": 3}, "metadata"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
async def test_wrong_bodies_are_refused_by_the_clients_own_names(
    live: Live, fields: dict[str, object], param: str
) -> None:
    response = await live.client.post(PATH, json=body(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    assert response.json()["error"]["message"].startswith(param)


async def test_errors_are_the_clients_own_classes() -> None:
    async with live_server(FakeScript()) as live, client_of(live) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"


async def test_a_failure_in_mid_stream_is_told_by_events() -> None:
    script = FakeScript(faults=(Fault(window=3, kind=FaultKind.SLOT, slot=0),))
    async with live_server(script) as live:
        response = await live.client.post(PATH, json=body(stream=True, ignore_eos=True))
        error, failed = events_of(response.text)[-2:]
        assert (error["type"], error["code"]) == ("error", "slot_failed")
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "slot_failed"
