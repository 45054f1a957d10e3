from __future__ import annotations

import asyncio

import pytest

from scheduler.turn import NextTurn


async def test_callbacks_of_one_turn_run_in_their_order_and_later_ones_in_another() -> None:
    turn, seen = NextTurn(), list[str]()

    def first() -> None:
        seen.append("first")
        turn.call(lambda: seen.append("later"))

    turn.call(first)
    turn.call(lambda: seen.append("second"))
    assert not seen
    await asyncio.sleep(0)
    assert seen == ["first", "second"]
    await asyncio.sleep(0)
    assert seen == ["first", "second", "later"]


async def test_one_that_fails_is_reported_and_stops_no_other() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(context["exception"])
    )
    turn, seen = NextTurn(), list[int]()
    error = ArithmeticError("broken")

    def fail() -> None:
        raise error

    turn.call(fail)
    turn.call(lambda: seen.append(1))
    await asyncio.sleep(0)
    assert (seen, reported) == ([1], [error])


class Clock:
    """The loop's timer and the clock, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.waits_s: list[float] = []
        monkeypatch.setattr("scheduler.turn.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("scheduler.turn.time.thread_time", lambda: self.now_s - 90.0)
        monkeypatch.setattr(
            asyncio.get_running_loop(),
            "call_later",
            lambda delay_s, callback: self.waits_s.append(delay_s),
        )

    def take(self, seconds: float) -> None:
        self.now_s += seconds


async def test_a_turn_that_took_long_is_followed_by_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    turn = NextTurn(rest=4.0, max_rest_s=0.02)
    turn.call(lambda: clock.take(0.003))
    await asyncio.sleep(0)
    clock.take(0.002)
    turn.call(lambda: None)
    turn.call(lambda: None)
    assert clock.waits_s == [pytest.approx(0.010)]


async def test_rest_is_bounded_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = Clock(monkeypatch), list[int]()
    turn = NextTurn(rest=4.0, max_rest_s=0.02)
    turn.call(lambda: clock.take(0.100))
    await asyncio.sleep(0)
    clock.take(0.021)
    turn.call(lambda: seen.append(1))
    await asyncio.sleep(0)
    assert seen == [1]
    assert not clock.waits_s
