"""uvicorn's HTTP protocol in Python, for systems without httptools; refuses what is no HTTP as the other one does."""

from __future__ import annotations

from functools import partial

from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.bare_refusal import MALFORMED, drop_connection, is_amid_answer
from gateway.stream import ABORT


class PlainHttpProtocol(H11Protocol):
    """One connection. h11 has its own bound on headers."""

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope:  # none before the first request
            # The request's task, if this has begun one, has not run yet.
            drop = partial(drop_connection, self.cycle, self.transport)
            self.scope[ABORT] = drop  # pyright: ignore[reportGeneralTypeIssues]

    def send_400_response(self, msg: str) -> None:
        del msg
        if not is_amid_answer(self.cycle):
            self.transport.write(MALFORMED)
        self.transport.close()
