"""The official client against a live server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from engine.fake import FakeScript
from gateway.config import ApiKey, GatewayConfig
from tests.conformance.live import MODEL, ids_of, live_server, says

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

    from tests.conformance.live import Live

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


def client_of(live: Live, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{live.url}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )


async def test_chat_whole_and_streamed() -> None:
    async with live_server(says("Hello, wörld!")) as live, client_of(live) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello, wörld!"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(ids_of("Hello, wörld!"))
        text = ""
        usage = None
        async for chunk in await client.chat.completions.create(
            model="default", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        ):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage
        assert text == "Hello, wörld!"
        assert usage is not None
        assert usage.prompt_tokens == answer.usage.prompt_tokens
        assert usage.completion_tokens == answer.usage.completion_tokens
        assert usage.total_tokens == answer.usage.total_tokens


async def test_the_stream_helper_assembles_the_message() -> None:
    async with live_server(says("<think>hm</think>One two.")) as live, client_of(live) as client:
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, logprobs=True, n=2
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
    for choice in final.choices:
        assert choice.message.content == "One two."
        assert choice.finish_reason == "stop"
        extra = choice.message.model_extra
        assert extra is not None
        assert extra["reasoning_content"] == "hm"


async def test_completions_and_models() -> None:
    async with live_server(says(" there")) as live, client_of(live) as client:
        answer = await client.completions.create(model=MODEL, prompt=["Hello", "Hi"], echo=True)
        assert [choice.text for choice in answer.choices] == ["Hello there", "Hi there"]
        text = ""
        async for chunk in await client.completions.create(model=MODEL, prompt="x", stream=True):
            text += "".join(choice.text for choice in chunk.choices)
        assert text == " there"
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_are_the_clients_own_classes() -> None:
    config = GatewayConfig(port=0, api_keys=(ApiKey(name="ann", secret="right"),))
    async with live_server(FakeScript(), config=config) as live:
        async with client_of(live, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(live, "right") as client:
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as too_long:
                await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=10**6
                )
            assert too_long.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model=MODEL,
                    messages=MESSAGES,
                    extra_body={"structured_outputs": {"regex": "("}},
                )
            assert refused.value.param == "structured_outputs.regex"


async def test_tool_calls_are_assembled_by_the_client() -> None:
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    async with live_server(says(text)) as live, client_of(live) as client:
        async with client.chat.completions.stream(
            model=MODEL,
            messages=MESSAGES,
            tools=[tool],  # type: ignore[list-item]
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a":1, "b":2}')
