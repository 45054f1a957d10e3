"""Connections that have not sent the head of a request: how long they may take, and how many there may be.

uvicorn closes a connection that is silent behind an answer; one that never gets as far as a request it would keep for
ever, and the files that a process may have open are few.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar, cast

from gateway.bare_refusal import bare_refusal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

KEEP_ALIVE_S = 120
"""Longer than clients keep an idle connection (httpx 5 s, aiohttp 15 s, Go 90 s): whoever closes first must be the
client, since a request that meets a closing server is lost without an answer."""
HEAD_TIMEOUT_S = 20.0
"""From a head's first byte to its last."""
MAX_PENDING = 256
"""Connections without a head: beyond them the oldest give way to a new one."""
GRACE_S = 1.0
"""... unless they are younger: of many clients that come at once each has this long to send its head."""

LATE = bare_refusal(
    HTTPStatus.REQUEST_TIMEOUT,
    "headers_timeout",
    f"the request's headers did not end within {HEAD_TIMEOUT_S:g} s, or too many connections had none yet",
)


class PendingHeads:
    """Those of one server."""

    def __init__(self) -> None:
        self._since_s: dict[HeadWatch, float] = {}
        """The oldest comes first."""
        self._is_making_room = False

    def __len__(self) -> int:
        return len(self._since_s)

    def add(self, watch: HeadWatch) -> None:
        """Idempotent."""
        if watch in self._since_s:
            return
        now_s = time.monotonic()
        self._since_s[watch] = now_s
        if len(self._since_s) > MAX_PENDING and not self._is_making_room:
            self._is_making_room = True
            try:
                self._make_room(now_s)
            finally:
                self._is_making_room = False

    def _make_room(self, now_s: float) -> None:
        """The oldest give way, each once: one that still has an answer to come waits on, as the newest."""
        for oldest, since_s in tuple(self._since_s.items()):
            if len(self._since_s) <= MAX_PENDING or now_s - since_s < GRACE_S:
                return
            oldest.give_up()

    def remove(self, watch: HeadWatch) -> None:
        self._since_s.pop(watch, None)


class HeadWatch:
    """One connection's wait for its next head."""

    def __init__(
        self, pending: PendingHeads, loop: asyncio.AbstractEventLoop, on_late: Callable[[], None]
    ) -> None:
        """on_late: the head has not come; called when nothing is waited for any more."""
        self._pending = pending
        self._loop = loop
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None
        self.has_begun = False
        """Some of the head is there."""

    def connected(self) -> None:
        """Nothing has come yet."""
        self._wait(KEEP_ALIVE_S)

    def begun(self) -> None:
        """A byte of a head has come; only the first one counts."""
        if not self.has_begun:
            self.has_begun = True
            self._wait(HEAD_TIMEOUT_S)

    def again(self) -> None:
        """It may take as long once more."""
        self._wait(HEAD_TIMEOUT_S)

    def arrived(self) -> None:
        """The head is whole, or the connection has ended. Idempotent."""
        self.has_begun = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._pending.remove(self)

    def give_up(self) -> None:
        self._pending.remove(self)
        self._on_late()

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.give_up)
        self._pending.add(self)


class HasHeads(Protocol):
    """A protocol class that is made for each server anew."""

    heads: ClassVar[PendingHeads]


_Class = TypeVar("_Class", bound=HasHeads)


def of_one_server(protocol: type[_Class]) -> type[_Class]:
    """The class with pending heads of its own."""
    return cast("type[_Class]", type(protocol.__name__, (protocol,), {"heads": PendingHeads()}))
