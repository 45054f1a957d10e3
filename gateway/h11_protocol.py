"""uvicorn's HTTP protocol in Python, for systems without httptools; refuses what is no HTTP as the other one does."""

from __future__ import annotations

from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.bare_refusal import MALFORMED, is_amid_answer


class PlainHttpProtocol(H11Protocol):
    """One connection. h11 has its own bound on headers."""

    def send_400_response(self, msg: str) -> None:
        del msg
        if not is_amid_answer(self.cycle):
            self.transport.write(MALFORMED)
        self.transport.close()
