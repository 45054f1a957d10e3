"""Who waits for a request's head, and who gives way when too many do."""

from __future__ import annotations

import asyncio

import pytest

from gateway import heads
from gateway.heads import HeadWatch, PendingHeads


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_PENDING", 3)
    monkeypatch.setattr(heads, "GRACE_S", 0.0)


async def test_the_oldest_heads_give_way_to_new_ones() -> None:
    pending, late = PendingHeads(), list[int]()
    for number in range(5):
        watch = HeadWatch(pending, asyncio.get_running_loop(), lambda n=number: late.append(n))
        watch.connected()
    assert late == [0, 1]
    assert len(pending) == 3


async def test_connections_that_all_wait_on_are_asked_once_each() -> None:
    """Answers are still to come on them, so that none can give way, however many there are."""
    pending, asked = PendingHeads(), list[int]()
    loop = asyncio.get_running_loop()
    watches: list[HeadWatch] = []

    def wait_on(number: int) -> None:
        asked.append(number)
        watches[number].again()

    for number in range(2000):
        watches.append(HeadWatch(pending, loop, lambda n=number: wait_on(n)))
        before = len(asked)
        watches[number].begun()
        assert len(set(asked[before:])) == len(asked) - before <= number + 1
    assert len(pending) == 2000
    for watch in watches:
        watch.arrived()
    assert len(pending) == 0
