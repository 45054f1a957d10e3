"""uvicorn's HTTP protocol in Python, for systems without httptools; refuses what is no HTTP as the other one does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.bare_refusal import (
    MALFORMED,
    drop_connection,
    has_answer_to_end,
    is_amid_answer,
)
from gateway.heads import LATE, HeadWatch, PendingHeads
from gateway.stream import ABORT

if TYPE_CHECKING:
    import asyncio


class PlainHttpProtocol(H11Protocol):
    """One connection. h11 has its own bound on headers."""

    heads: ClassVar[PendingHeads]
    _head: HeadWatch

    def connection_made(  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn has it
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self._head = HeadWatch(self.heads, self.loop, self._head_is_late)
        self._head.connected()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            self._head.begun()
        super().data_received(data)

    def _head_is_late(self) -> None:
        if has_answer_to_end(self.cycle):
            self._head.again()
            return
        if self._head.has_begun:
            self.transport.write(LATE)
        self.transport.close()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._head.arrived()
        if self.scope:  # none before the first request
            # The request's task, if this has begun one, has not run yet.
            drop = partial(drop_connection, self.cycle, self.transport)
            self.scope[ABORT] = drop  # pyright: ignore[reportGeneralTypeIssues]

    def send_400_response(self, msg: str) -> None:
        del msg
        if not is_amid_answer(self.cycle):
            self.transport.write(MALFORMED)
        self.transport.close()
