"""The whole road with nothing replaced: `stratagate serve`, the shipped model, a client that speaks HTTP."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from anthropic.types import Message
from openai import AsyncOpenAI

from gateway.preparation import choice_seed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

QUESTIONS = ("What is bread made of?", "Tell me about the sea.", "How do I learn to draw?")
NUM_STREAMS = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ("-m", "gateway", "serve", "--port", str(port), "--threads", "1", "--device", "cpu")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while b"ready in" not in (line := await process.stderr.readline()):
            assert line, "the server ended before it was ready"
    drain = asyncio.create_task(process.stderr.read())
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    await drain
    assert await process.wait() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client


async def answer(client: AsyncOpenAI, question: str, **fields: Any) -> str:
    reply = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        seed=11,
        extra_body=fields,
    )
    return reply.choices[0].message.content or ""


async def test_a_streamed_chat_reads_as_english(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Tell me a short story about a dog."}],
        max_tokens=48,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, finishes, usage = "", list[str](), None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    words = [word.strip(".,!?\"'").lower() for word in text.split()]
    common = {"the", "a", "was", "and", "of", "to", "in", "he", "she", "it", "once", "is", "his"}
    assert len(words) > 15
    assert sum(word in common for word in words) >= len(words) / 5
    assert all(
        character.isascii() and character.isprintable() or character == "\n" for character in text
    )
    assert finishes in (["stop"], ["length"])
    assert usage is not None
    assert 0 < usage.completion_tokens <= 48


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_drafts_do_not_change_an_answer(client: AsyncOpenAI, temperature: float) -> None:
    plain = [await answer(client, q, spec=0, temperature=temperature) for q in QUESTIONS]
    drafted = [
        await answer(client, q, spec=4, spec_min_p=0.0, temperature=temperature) for q in QUESTIONS
    ]
    assert drafted == plain
    together = await asyncio.gather(
        *(answer(client, q, temperature=temperature) for q in (*QUESTIONS, *QUESTIONS))
    )
    assert list(together) == [*plain, *plain]


async def test_choices_share_their_prompt_and_are_those_of_separate_requests(
    client: AsyncOpenAI,
) -> None:
    question = f"{QUESTIONS[0]} {'Tell me more. ' * 20}{QUESTIONS[1]}"
    asked: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 7,
    }
    together = await client.chat.completions.create(**asked, n=4)
    texts = [choice.message.content for choice in together.choices]
    seeds = [choice_seed(7, number) for number in range(4)]
    separate: list[Any] = [{**asked, "seed": seed} for seed in seeds]
    alone = [await client.chat.completions.create(**fields) for fields in separate]
    assert texts == [answer.choices[0].message.content for answer in alone]
    assert len(set(texts)) > 1
    # The prompt counts once, and what the choices had of each other is not what the cache gave.
    first, again = together.usage, alone[0].usage
    assert first is not None and first.prompt_tokens_details is not None
    assert again is not None and again.prompt_tokens_details is not None
    assert first.prompt_tokens == again.prompt_tokens
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 0 < (again.prompt_tokens_details.cached_tokens or 0) < again.prompt_tokens


@pytest.mark.parametrize("budget", [1, 6])
async def test_a_thinking_budget_of_anthropics_holds_and_the_answer_follows(
    url: str, budget: int
) -> None:
    asked: Any = {
        "model": "default",
        "max_tokens": budget + 20,
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "extra_body": {"seed": 3, "enable_thinking": None},
    }
    thinking: Any = {"type": "enabled", "budget_tokens": budget}
    async with (
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as anthropic,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        free = await anthropic.messages.create(**asked, thinking={"type": "adaptive"})
        whole = await anthropic.messages.create(**asked, thinking=thinking)
        async with anthropic.messages.stream(**asked, thinking=thinking) as stream:
            streamed = await stream.get_final_message()
        off = await anthropic.messages.create(**asked, thinking={"type": "disabled"})
        counts = [await num_tokens(http, block_texts(answer)[0]) for answer in (free, whole)]
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert block_texts(streamed) == block_texts(whole)
    # So long the thought is the model's own, then it is closed; without the budget it had gone on.
    assert block_texts(free)[0].startswith(block_texts(whole)[0])
    assert counts[1] == budget < counts[0]
    assert block_texts(whole)[1]
    assert [block.type for block in off.content] == ["text"]


def block_texts(answer: Message) -> list[str]:
    blocks = [block.to_dict() for block in answer.content]
    return [str(block.get("thinking") or block.get("text")) for block in blocks]


async def num_tokens(client: httpx.AsyncClient, text: str) -> int:
    reply = await client.post("/tokenize", json={"prompt": text})
    return reply.json()["count"]


async def test_twenty_streams_finish_with_right_usage(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        counts = await asyncio.gather(*(stream_usage(client, n) for n in range(NUM_STREAMS)))
        metrics = (await client.get("/metrics")).text
    assert [count for count, _ in counts] == [8 + n for n in range(NUM_STREAMS)]
    assert all(chunks <= count for count, chunks in counts)
    assert "stratagate" in metrics


async def stream_usage(client: httpx.AsyncClient, number: int) -> tuple[int, int]:
    """Completion tokens by usage and the number of content chunks of one stream of 8 + number tokens."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        "max_tokens": 8 + number,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks, usage = 0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        event = orjson.loads(line.removeprefix("data: "))
        chunks += any(choice["delta"].get("content") for choice in event["choices"])
        usage = event["usage"]["completion_tokens"] if event.get("usage") else usage
    return usage, chunks
