"""uvicorn's HTTP protocol with bounds on headers, ways to drop and to end a connection, and a way to write at once."""

from __future__ import annotations

import socket
from functools import partial
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.bare_refusal import (
    MALFORMED,
    bare_refusal,
    drop_connection,
)
from gateway.stream import ABORT, HANG_UP, WRITE
from gateway.watched_protocol import WatchedProtocol

MAX_HEADER_BYTES = 64 * 1024

_TOO_LARGE = bare_refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "headers_too_large",
    f"the request's headers are larger than {MAX_HEADER_BYTES} bytes",
)


class BoundedHttpProtocol(WatchedProtocol, HttpToolsProtocol):
    """One connection."""

    _in_headers = True
    """Between requests as well: what comes then begins the next one."""
    _header_bytes = 0

    def data_received(self, data: bytes) -> None:
        # The parser keeps an unfinished header itself, so bytes are counted before it sees them. A read is at most
        # 256 KiB, which bounds what a body's first piece can add.
        if self._in_headers:
            self._head.begun()
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and b"\r\n\r\n" not in data[:MAX_HEADER_BYTES]:
                self._refuse(_TOO_LARGE)
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._head.arrived()
        super().on_headers_complete()
        drop = partial(drop_connection, self.cycle, self.transport)
        self.scope[ABORT] = drop  # pyright: ignore[reportGeneralTypeIssues]
        self.scope[WRITE] = self._write_now  # pyright: ignore[reportGeneralTypeIssues]
        if hasattr(socket, "TCP_CORK"):
            hang_up = partial(self._hang_up, self.cycle)
            self.scope[HANG_UP] = hang_up  # pyright: ignore[reportGeneralTypeIssues]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers, self._header_bytes = True, 0

    def _write_now(self, data: bytes) -> bool:
        """A WriteNow: a chunk of the transfer coding that uvicorn gives every answer without a length."""
        if self.flow.write_paused:
            return False
        if data and not self.transport.is_closing():  # an empty chunk would end the body
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _hang_up(self, cycle: RequestResponseCycle) -> None:
        """Close the connection behind an answer that has begun.

        Its headers did not say so, and a client that keeps connections may send its next request once it has the end
        of the answer. So the kernel holds the last bytes back until the connection is closed, and both ends leave in
        one segment: who has read the one has been told the other. Without such a socket option requests would be lost.
        """
        cycle.keep_alive = False
        if not self.transport.is_closing():
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(MALFORMED)
