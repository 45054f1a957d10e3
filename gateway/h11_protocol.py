"""uvicorn's HTTP protocol in Python, for systems without httptools; refuses what is no HTTP as the other one does."""

from __future__ import annotations

from functools import partial

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.bare_refusal import MALFORMED, drop_connection
from gateway.stream import ABORT
from gateway.watched_protocol import WatchedProtocol


class PlainHttpProtocol(WatchedProtocol, H11Protocol):
    """One connection. h11 has its own bound on headers."""

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            self._head.begun()
        super().data_received(data)

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
        self._refuse(MALFORMED)
