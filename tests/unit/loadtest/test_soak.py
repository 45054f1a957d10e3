"""The soak mixes all kinds of clients, repeats with its seed, and plays conversations to their end."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from random import Random

from loadtest.agreement import CANARY
from loadtest.client import RequestPlan
from loadtest.driver import Driver
from loadtest.soak import soak_mix
from loadtest.workload import Conversation
from tests.unit.loadtest.virtual import TARGET, ScriptedServer, client, limits, run, steady


def mix(count: int, seed: int = 0) -> list[Conversation | RequestPlan]:
    source = soak_mix(
        Random(seed), model="m", max_tokens=16, document_words=300, oversize_words=1000
    )
    return list(itertools.islice(source, count))


def test_all_kinds_appear_and_follow_the_seed() -> None:
    kinds = Counter(item.kind for item in mix(600))
    assert kinds.keys() >= {"chat", "multi-turn", "agent", "document", "impatient", CANARY}
    assert kinds.keys() >= {"slow reader", "malformed", "oversize", "wrong model", "disconnect"}
    assert mix(60) == mix(60) != mix(60, seed=1)


def test_the_canary_is_always_the_same_greedy_request() -> None:
    bodies = {
        item.body for item in mix(600) if isinstance(item, RequestPlan) and item.kind == CANARY
    }
    (body,) = bodies
    assert json.loads(body)["temperature"] == 0


def test_agents_share_a_prefix_and_answer_with_what_a_tool_returned() -> None:
    agents = [item for item in mix(300) if isinstance(item, Conversation) and item.kind == "agent"]
    assert len({agent.system for agent in agents}) == 1
    server = ScriptedServer(lambda _: steady(ttft_s=0.1, itl_s=0.1, num_chunks=2))

    async def play() -> None:
        async with client(server) as http:
            driver = Driver(http=http, target=TARGET, limits=limits(), source=iter(agents[:1]))
            await driver.closed_loop(1)

    run(play())
    assert len(server.requests) == len(agents[0].turns)
    last = server.requests[-1]
    assert [message["role"] for message in last["messages"][:4]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    called, result = last["messages"][2], last["messages"][3]
    assert called["tool_calls"][0]["id"] == result["tool_call_id"]
    assert called["tool_calls"][0]["function"]["name"] == last["tools"][0]["function"]["name"]
    assert called["content"] == "x x "
