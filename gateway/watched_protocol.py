"""What uvicorn's two HTTP protocols get alike: a bounded wait for each head."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from gateway.bare_refusal import has_answer_to_end, is_amid_answer
from gateway.heads import LATE, HeadWatch, PendingHeads


class WatchedProtocol(asyncio.Protocol):
    """One connection; stands before uvicorn's class. That one begins and ends the wait, where it parses."""

    heads: ClassVar[PendingHeads]
    _head: HeadWatch

    if TYPE_CHECKING:
        loop: asyncio.AbstractEventLoop
        cycle: Any
        transport: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head = HeadWatch(self.heads, self.loop, self._head_is_late)
        self._head.connected()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.arrived()
        super().connection_lost(exc)

    def _head_is_late(self) -> None:
        if has_answer_to_end(self.cycle):
            self._head.again()
        elif self._head.has_begun:
            self._refuse(LATE)
        else:
            self.transport.close()

    def _refuse(self, answer: bytes) -> None:
        """End the connection, with an answer unless another one has begun."""
        if self.transport.is_closing():
            return
        if not is_amid_answer(self.cycle):
            self.transport.write(answer)
        self.transport.close()
