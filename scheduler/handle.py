"""RequestHandle: the caller's end of one request. The loop puts events in, the caller iterates or cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from scheduler.messages import Failed, Finished, GenerateRequest, TokenEvent, Usage


class RequestHandle(AsyncIterator[TokenEvent]):
    """Async iterator of a request's events, for one consumer.

    It ends after exactly one Finished or Failed, or at once when cancelled. Events that nobody reads are bounded by
    the request's max_tokens. Cancelling a pending `anext` loses no event. Times are on the scheduler's clock.
    """

    def __init__(
        self, request: GenerateRequest, *, submitted_s: float, on_cancel: Callable[[], None]
    ) -> None:
        self.request = request
        self.submitted_s = submitted_s
        self.started_s: float | None = None
        """When it got a slot."""
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        """When its Finished or Failed was published, or it was cancelled."""
        self.usage: Usage | None = None
        """What it had cost when it was cancelled; one that ends by itself says so in its Finished."""
        self._events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        self._on_cancel = on_cancel
        self._cancelled = False
        self._exhausted = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave it up before it ended."""
        return self._cancelled

    @property
    def ended(self) -> bool:
        """Whether its last event was published or it was cancelled."""
        return self._cancelled or self.ended_s is not None

    def cancel(self) -> None:
        """Give the request up: no event comes after this, its slot is freed when its window returns.

        Does nothing when called again or after the last event was published.
        """
        if self.ended:
            return
        self._cancelled = True
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)
        self._on_cancel()

    async def __anext__(self) -> TokenEvent:
        if self._exhausted:
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None:
            self._exhausted = True
            raise StopAsyncIteration
        self._exhausted = isinstance(event, Finished | Failed)
        return event

    def publish(self, event: TokenEvent, now_s: float) -> None:
        """For the loop alone: deliver an event, unless the caller has left or the last one was delivered."""
        if self.ended:
            return
        if isinstance(event, Finished | Failed):
            self.ended_s = now_s
        elif self.first_token_s is None:
            self.first_token_s = now_s
        self._events.put_nowait(event)
