"""The caller's end of a request: order, one ending, silence after cancel."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.errors import EngineDead
from scheduler.handle import RequestHandle
from scheduler.messages import Failed, TokenEvent, Tokens
from tests.factories import make_request

ONE, TWO = Tokens(token_ids=(1,)), Tokens(token_ids=(2,))
DEAD = Failed(error=EngineDead("x"))


class Cancels:
    """Counts what the loop would be told."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def cancels() -> Cancels:
    return Cancels()


@pytest.fixture
def handle(cancels: Cancels) -> RequestHandle:
    return RequestHandle(make_request(), submitted_s=10.0, on_cancel=cancels)


async def test_events_come_in_order_and_end_with_the_last(handle: RequestHandle) -> None:
    for now_s, event in enumerate((ONE, TWO, DEAD), start=11):
        handle.publish(event, float(now_s))
    assert [event async for event in handle] == [ONE, TWO, DEAD]
    assert [event async for event in handle] == []
    assert (handle.first_token_s, handle.ended_s) == (11.0, 13.0)


async def test_nothing_follows_the_last_event(handle: RequestHandle) -> None:
    for event in (DEAD, ONE, DEAD):
        handle.publish(event, 11.0)
    assert [event async for event in handle] == [DEAD]


async def test_cancel_discards_what_was_not_read(handle: RequestHandle, cancels: Cancels) -> None:
    handle.publish(ONE, 11.0)
    handle.publish(TWO, 11.0)
    assert await anext(handle) == ONE
    handle.cancel()
    handle.cancel()
    handle.publish(DEAD, 12.0)
    assert [event async for event in handle] == []
    assert cancels.count == 1
    assert handle.cancelled and handle.ended


async def test_cancel_after_the_end_is_nothing(handle: RequestHandle, cancels: Cancels) -> None:
    handle.publish(DEAD, 11.0)
    handle.cancel()
    assert [event async for event in handle] == [DEAD]
    assert cancels.count == 0
    assert not handle.cancelled


async def test_a_cancelled_wait_loses_no_event(handle: RequestHandle) -> None:
    waiting = asyncio.ensure_future(anext(handle))
    await asyncio.sleep(0)
    handle.publish(ONE, 11.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await anext(handle) == ONE


async def test_a_listener_gets_what_waits_and_what_comes_but_never_at_once(
    handle: RequestHandle,
) -> None:
    heard: list[TokenEvent] = []
    handle.publish(ONE, 11.0)
    handle.listen(heard.append)
    handle.publish(TWO, 11.0)
    assert heard == []
    await asyncio.sleep(0)
    assert heard == [ONE, TWO]
    handle.publish(DEAD, 12.0)
    assert heard == [ONE, TWO]
    await asyncio.sleep(0)
    assert heard == [ONE, TWO, DEAD]


async def test_a_listener_hears_nothing_after_its_cancel(handle: RequestHandle) -> None:
    heard: list[TokenEvent] = []

    def leave(event: TokenEvent) -> None:
        heard.append(event)
        handle.cancel()

    handle.listen(leave)
    for event in (ONE, TWO):
        handle.publish(event, 11.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert heard == [ONE]
