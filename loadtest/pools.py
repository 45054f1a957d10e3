"""An httpx transport for many connections at once.

httpx's pool looks at all its connections, several times, for every request that begins or ends: for a burst of
hundreds that takes longer than the requests. So each pool here has at most a few dozen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx

_REQUESTS_A_POOL = 32


class Pools(httpx.AsyncBaseTransport):
    """As many pools as it takes; a request goes to the first that has room, so that few clients reuse one pool."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        """make: a new pool."""
        self._make = make
        self._pools: list[httpx.AsyncBaseTransport] = []
        self._running: list[int] = []
        """Requests of each pool."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        index = self._first_with_room()
        self._running[index] += 1
        try:
            response = await self._pools[index].handle_async_request(request)
        except BaseException:
            self._running[index] -= 1
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, lambda: self._ended(index))
        return response

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()

    def _first_with_room(self) -> int:
        for index, running in enumerate(self._running):
            if running < _REQUESTS_A_POOL:
                return index
        self._pools.append(self._make())
        self._running.append(0)
        return len(self._pools) - 1

    def _ended(self, index: int) -> None:
        self._running[index] -= 1


class _Body(httpx.AsyncByteStream):
    """A body that tells when it is closed; reading it costs nothing more."""

    def __init__(self, stream: httpx.AsyncByteStream, on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._on_close: Callable[[], None] | None = on_close

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        if self._on_close is not None:
            self._on_close()
            self._on_close = None
        await self._stream.aclose()
