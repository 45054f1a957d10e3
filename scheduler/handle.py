"""RequestHandle: the caller's end of one request. The loop puts events in, the caller listens, iterates or cancels."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from scheduler.messages import GenerateRequest, TokenEvent, Tokens, Usage
from scheduler.turn import NextTurn


class RequestHandle(AsyncIterator[TokenEvent]):
    """A request's events, for one consumer: by a callback, or as an async iterator.

    They end with exactly one Finished or Failed, or at once when cancelled. Events that nobody reads are bounded by
    the request's max_tokens. Cancelling a pending `anext` loses no event. Times are on the scheduler's clock.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        submitted_s: float,
        on_cancel: Callable[[], None],
        turn: NextTurn | None = None,
    ) -> None:
        """turn: delivers what is listened for; shared with other handles, or its own."""
        self.request = request
        self.submitted_s = submitted_s
        self.started_s: float | None = None
        """When it got a slot."""
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        """When its Finished or Failed was published, or it was cancelled."""
        self.usage: Usage | None = None
        """What it had cost when it ended or was cancelled."""
        self._events: deque[TokenEvent] = deque()
        self._notify: Callable[[], object] | None = None
        """Says to the consumer that there are events; None while it knows, or is not there."""
        self._on_cancel = on_cancel
        self._turn = turn or NextTurn()
        self._cancelled = False

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
        self._events.clear()
        self._tell()
        self._on_cancel()

    def listen(self, on_event: Callable[[TokenEvent], None]) -> None:
        """Have every event, those that wait included, given to `on_event` by the event loop, one call after the other.

        The loop that publishes never runs it itself: the next window is on its way before this one's text is made.
        """
        events = self._events

        def deliver() -> None:
            self._notify = notify
            while events:
                on_event(events.popleft())

        notify = partial(self._turn.call, deliver)
        self._notify = notify
        if events:
            self._tell()

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self.ended:
                raise StopAsyncIteration
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._notify = partial(_resolve, arrived)
            await arrived
        return self._events.popleft()

    def publish(self, event: TokenEvent, now_s: float) -> None:
        """For the loop alone: deliver an event, unless the caller has left or the last one was delivered."""
        if self._cancelled or self.ended_s is not None:
            return
        if not isinstance(event, Tokens):
            self.ended_s = now_s
        elif self.first_token_s is None:
            self.first_token_s = now_s
        self._events.append(event)
        if (notify := self._notify) is not None:
            self._notify = None
            notify()

    def _tell(self) -> None:
        if (notify := self._notify) is not None:
            self._notify = None
            notify()


def _resolve(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
