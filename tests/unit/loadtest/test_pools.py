"""Requests are spread over pools, few clients over one, and a pool's room is given back however a request ends."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from loadtest.pools import Pools
from tests.unit.loadtest.virtual import ScriptedServer, Unreachable, client, run, steady


def made_for(rounds: list[int]) -> int:
    """Pools made for so many requests at once, round after round."""
    made: list[ScriptedServer] = []

    def make() -> ScriptedServer:
        made.append(ScriptedServer(lambda _: steady(ttft_s=1.0, itl_s=0.0, num_chunks=1)))
        return made[-1]

    async def main() -> None:
        async with client(Pools(make)) as http:
            for count in rounds:
                answers = await asyncio.gather(*(http.post("x", json={}) for _ in range(count)))
                assert all(b"[DONE]" in answer.content for answer in answers)

    run(main())
    return len(made)


@pytest.mark.parametrize(
    ("rounds", "pools"), [([1, 1, 1], 1), ([32, 32], 1), ([33], 2), ([680, 5, 680], 22)]
)
def test_pools_are_made_for_requests_at_once(rounds: list[int], pools: int) -> None:
    assert made_for(rounds) == pools


def test_a_request_that_fails_or_is_left_gives_its_room_back() -> None:
    made: list[httpx.AsyncBaseTransport] = []

    def unreachable() -> httpx.AsyncBaseTransport:
        made.append(Unreachable())
        return made[-1]

    def slow() -> httpx.AsyncBaseTransport:
        made.append(ScriptedServer(lambda _: steady(ttft_s=99.0, itl_s=0.0, num_chunks=1)))
        return made[-1]

    async def fail(http: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.ConnectError):
            await http.post("x", json={})

    async def leave(http: httpx.AsyncClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await http.post("x", json={})

    async def main() -> None:
        for make, end in ((unreachable, fail), (slow, leave)):
            made.clear()
            async with client(Pools(make)) as http:
                for _ in range(40):
                    await end(http)
            assert len(made) == 1

    run(main())
