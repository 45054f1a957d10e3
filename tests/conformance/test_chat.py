"""Chat completions as bytes on a socket: framing, parts, usage, stops, choices."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from engine.fake import FakeScript
from gateway.config import GatewayConfig
from tests.conformance.live import MODEL, chat_body, default_files, ids_of, live_server, says

if TYPE_CHECKING:
    from tests.conformance.live import Live

PATH = "/v1/chat/completions"
USAGE = {"include_usage": True}


@dataclass
class Stream:
    """A stream taken apart, its framing checked."""

    raw: str
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, raw: str) -> Stream:
        stream = cls(raw)
        assert raw.endswith("data: [DONE]\n\n")
        events = raw.removesuffix("data: [DONE]\n\n").split("\n\n")
        assert events.pop() == ""
        for event in events:
            assert "\n" not in event
            assert "\r" not in event
            if event.startswith(":"):
                stream.comments.append(event)
            else:
                assert event.startswith("data: {")
                stream.chunks.append(json.loads(event.removeprefix("data: ")))
        return stream

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [
            choice
            for chunk in self.chunks
            for choice in chunk["choices"]
            if choice["index"] == index
        ]

    def text(self, part: str = "content", index: int = 0) -> str:
        return "".join(choice["delta"].get(part, "") for choice in self.choices(index))

    def finish_reasons(self, index: int = 0) -> list[str]:
        reasons = [choice["finish_reason"] for choice in self.choices(index)]
        return [reason for reason in reasons if reason is not None]


async def stream(live: Live, **fields: object) -> Stream:
    response = await live.client.post(PATH, json=chat_body(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return Stream.parse(response.text)


async def whole(live: Live, **fields: object) -> dict[str, Any]:
    response = await live.client.post(PATH, json=chat_body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_stream_has_role_content_finish_usage_done_in_this_order() -> None:
    async with live_server(says("Hello wörld 😀!")) as live:
        result = await stream(live, stream_options=USAGE)
    first, *middle, finish, usage = result.chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "Hello wörld 😀!"
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert all(chunk["usage"] is None for chunk in result.chunks[:-1])
    count = len(ids_of("Hello wörld 😀!"))
    assert usage["usage"]["completion_tokens"] == count
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + count
    heads = {(c["id"], c["object"], c["created"], c["model"]) for c in result.chunks}
    assert len(heads) == 1
    assert next(iter(heads))[1] == "chat.completion.chunk"
    assert next(iter(heads))[3] == MODEL


async def test_usage_is_absent_unless_asked_for() -> None:
    async with live_server(says("Hi")) as live:
        result = await stream(live)
        assert all("usage" not in chunk for chunk in result.chunks)
        assert result.chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_usage_in_every_chunk_when_asked_for() -> None:
    async with live_server(says("one two three four five six seven")) as live:
        options = {"include_usage": True, "continuous_usage_stats": True}
        result = await stream(live, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in result.chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(ids_of("one two three four five six seven"))


async def test_streamed_and_whole_say_the_same() -> None:
    async with live_server(FakeScript()) as live:
        fields: dict[str, object] = {"seed": 7, "max_tokens": 50, "ignore_eos": True}
        one = await whole(live, **fields)
        many = await stream(live, **fields)
    assert one["choices"][0]["message"]["content"] == many.text()
    assert [one["choices"][0]["finish_reason"]] == many.finish_reasons() == ["length"]
    assert one["usage"]["completion_tokens"] == 50
    assert one["object"] == "chat.completion"
    assert one["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("spec", [0, 1, 4])
async def test_drafts_do_not_change_the_text(spec: int) -> None:
    text = "<think>\nLet me see.\n</think>\n\nThe answer is 42, wörld."
    async with live_server(says(text)) as live:
        result = await stream(live, spec=spec, stream_options=USAGE)
    assert result.text("reasoning_content") == "Let me see."
    assert result.text() == "The answer is 42, wörld."
    usage = result.chunks[-1]["usage"]
    assert usage["completion_tokens"] == len(ids_of(text))
    opening = default_files().tokenizer.encode_text("\nLet me see.\n")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(opening) + 2


async def test_output_starts_in_the_thought_when_the_prompt_opened_it() -> None:
    async with live_server(says("Hm, hm.\n</think>\n\nYes.")) as live:
        answer = await whole(live, enable_thinking=True)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm, hm."
        assert message["content"] == "Yes."
        answer = await whole(live, chat_template_kwargs={"enable_thinking": False})
        assert "reasoning_content" not in answer["choices"][0]["message"]


@pytest.mark.parametrize("stop", ["five", [" fo", "never"], ["r f"], ["three four", "our"]])
async def test_nothing_of_a_stop_string_gets_out(stop: str | list[str]) -> None:
    text = "one two three four five six"
    strings = [stop] if isinstance(stop, str) else stop
    ends = [text.find(s) + len(s) for s in strings if s in text]
    kept = text[: min(text.find(s) for s in strings if s in text)]
    async with live_server(says(text)) as live:
        for spec in (0, 4):
            result = await stream(live, stop=stop, spec=spec, stream_options=USAGE)
            assert result.text() == kept
            assert result.finish_reasons() == ["stop"]
            count = result.chunks[-1]["usage"]["completion_tokens"]
            counted = default_files().decode(ids_of(text)[:count])
            assert len(counted) >= min(ends)
            assert len(default_files().decode(ids_of(text)[: count - 1])) < min(ends)
        await live.wait_idle()


async def test_what_looked_like_a_stop_string_is_delivered_at_the_end() -> None:
    async with live_server(says("one two thr")) as live:
        result = await stream(live, stop=["three"])
        assert result.text() == "one two thr"
        assert result.finish_reasons() == ["stop"]


async def test_a_stop_id_ends_the_text_and_is_counted_but_not_shown() -> None:
    ids = ids_of("one two three four")
    async with live_server(says("one two three four")) as live:
        answer = await whole(live, stop_token_ids=[ids[2]])
    choice = answer["choices"][0]
    assert choice["message"]["content"] == default_files().decode(ids[:2])
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


async def test_ignore_eos_goes_on_to_the_limit() -> None:
    async with live_server(says("one two")) as live:
        answer = await whole(live, ignore_eos=True, max_tokens=9)
        assert answer["usage"]["completion_tokens"] == 9
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["content"] == "one two"


async def test_choices_come_under_their_own_index() -> None:
    async with live_server(FakeScript()) as live:
        fields: dict[str, object] = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
        alone = await whole(live, **fields)
        answer = await whole(live, n=3, **fields)
        result = await stream(live, n=3, stream_options=USAGE, **fields)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert texts[0] == alone["choices"][0]["message"]["content"]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    for index in range(3):
        assert result.text(index=index) == texts[index]
        assert result.finish_reasons(index) == ["length"]
    assert result.chunks[-1]["usage"]["completion_tokens"] == 36


async def test_logprobs_belong_to_the_delivered_tokens() -> None:
    text = "one two three"
    async with live_server(says(text)) as live:
        answer = await whole(live, logprobs=True, top_logprobs=2)
        content = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == text.encode()
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
        result = await stream(live, logprobs=True)
        streamed = [
            entry
            for choice in result.choices()
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
        cut = await whole(live, logprobs=True, stop=" two")
        names = [entry["token"] for entry in cut["choices"][0]["logprobs"]["content"]]
        assert "".join(names) == "one"


async def test_parts_roles_and_history_are_read() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nIt is done."},
        {"role": "user", "content": "Thanks."},
    ]
    async with live_server(says("ok")) as live:
        response = await live.client.post(PATH, json={"model": MODEL, "messages": messages})
        assert response.status_code == 200
        tokens = response.json()["usage"]["prompt_tokens"]
        assert tokens > 60


async def test_headers_and_role_arrive_before_the_prompt_is_read() -> None:
    script = says("late", prompt_token_s=0.05)
    async with live_server(script) as live:
        body = chat_body(stream=True)
        async with live.client.stream("POST", PATH, json=body) as response:
            # Nobody promises to keep a connection that may have to end with the answer.
            assert "connection" not in response.headers
            lines = response.aiter_lines()
            first = await anext(lines)
            assert '"role":"assistant"' in first
            assert live.scheduler.stats().totals.completion_tokens == 0


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    config = GatewayConfig(port=0, keepalive_s=0.05)
    async with live_server(says("late", prompt_token_s=0.02), config=config) as live:
        result = await stream(live)
    assert len(result.comments) >= 2
    assert set(result.comments) == {": keep-alive"}
    assert result.text() == "late"


async def test_twenty_streams_at_once_have_right_texts_and_usage() -> None:
    async with live_server(FakeScript()) as live:

        async def one(number: int) -> tuple[str, int]:
            result = await stream(
                live,
                content=f"number {number}",
                seed=5,
                max_tokens=30 + number,
                stream_options=USAGE,
            )
            assert result.finish_reasons() == ["length"]
            return result.text(), result.chunks[-1]["usage"]["completion_tokens"]

        together = await asyncio.gather(*map(one, range(20)))
        assert [count for _, count in together] == [30 + number for number in range(20)]
        assert len({text for text, _ in together}) == 20
        assert together[7] == await one(7)
        await live.wait_idle()


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of <|im_end|> a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CALLS = (
    "<think>\nWhere?\n</think>\n\nLet me look.\n\n"
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nÅlesund\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize("spec", [0, 2, 4])
async def test_tool_calls_whole_and_streamed(spec: int) -> None:
    async with live_server(says(CALLS)) as live:
        answer = await whole(live, tools=[TOOL], spec=spec)
        result = await stream(live, tools=[TOOL], spec=spec)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert choice["message"]["reasoning_content"] == "Where?"
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_weather"] * 2
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        {"city": "Ålesund"},
        {"city": "Oslo"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert result.finish_reasons() == ["tool_calls"]
    assert result.text() == "Let me look."
    pieces = [
        piece for choice in result.choices() for piece in choice["delta"].get("tool_calls", [])
    ]
    for index, call in enumerate(calls):
        own = [piece for piece in pieces if piece["index"] == index]
        assert own[0]["id"].startswith("call_")
        assert all("id" not in piece for piece in own[1:])
        arguments = "".join(piece["function"]["arguments"] for piece in own)
        assert arguments == call["function"]["arguments"]


async def test_tools_are_shown_to_the_model_unless_they_are_off() -> None:
    async with live_server(says("<tool_call>x")) as live:
        without = (await whole(live))["usage"]["prompt_tokens"]
        shown = (await whole(live, tools=[TOOL]))["usage"]["prompt_tokens"]
        off = await whole(live, tools=[TOOL], tool_choice="none")
    assert shown > without + 40
    assert off["usage"]["prompt_tokens"] == without
    assert off["choices"][0]["message"]["content"] == "<tool_call>x"
