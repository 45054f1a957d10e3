"""Server-sent events from the pieces of a body. Pure: no clock and no HTTP, so that it costs little per token."""

from __future__ import annotations

from collections.abc import Iterator

_MAX_LINE_BYTES = 8 << 20


class SseError(Exception):
    """Bytes that are no event stream."""


class EventDecoder:
    """Give it the pieces as they come; it gives the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Lines end in LF or CRLF; comments and fields other than data are skipped. Raises SseError."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise SseError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                if self._data:
                    yield b"\n".join(self._data)
                    self._data.clear()
            elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise SseError(f"not a line of an event stream: {line[:80]!r}")
