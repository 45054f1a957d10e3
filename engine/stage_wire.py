"""What the engine and its stages say to each other: orders one way, reports the other, over a socket pair.

Tensors do not come this way (see engine.stage_link). No pickle: a frame can only become one of the messages below.
"""

from __future__ import annotations

import contextlib
import socket
import struct

import msgspec
from msgspec import Struct

from engine.config import EngineConfig
from engine.interface import PlanItem

_LENGTH = struct.Struct(">I")


class LoadStage(Struct, frozen=True, kw_only=True, tag=True):
    """First order: hold one of `count` runs of layers; answered by StageReady or StageFailed."""

    config: EngineConfig
    """With the stage's own device, and without drafts."""
    index: int
    count: int
    store: str
    """File in which the stages find each other."""


class BeginSlot(Struct, frozen=True, kw_only=True, tag=True):
    """Make a slot fresh."""

    slot: int


class ClearSlot(Struct, frozen=True, kw_only=True, tag=True):
    """Make the slot's K/V cells 0."""

    slot: int


class StageWindow(Struct, frozen=True, kw_only=True, tag=True):
    """Run a window's rows through the layers and pass the streams on. See engine.state.Rows."""

    slots: tuple[int, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    ids: bytes
    """int64 [R, context + 1]."""


class StageChunk(Struct, frozen=True, kw_only=True, tag=True):
    """Read a prompt piece through the layers and pass the streams on."""

    slot: int
    start: int
    ids: bytes
    """int64 [T, context + 1]."""
    checkpoint_id: int | None
    """Keep the running state behind it: by the time that the engine keeps its own, the next piece may be read here."""


class StageCommit(Struct, frozen=True, kw_only=True, tag=True):
    """Keep the first rows of slots' last window."""

    kept: dict[int, int]
    """Rows by slot."""


class MovePages(Struct, frozen=True, kw_only=True, tag=True):
    """Copy pages from the slot, or back to it."""

    slot: int
    pages: tuple[tuple[int, int], ...]
    """(index, page id) of each."""
    to_slot: bool


class MoveCheckpoint(Struct, frozen=True, kw_only=True, tag=True):
    """Copy the running state from the slot, or back to it."""

    checkpoint_id: int
    slot: int
    to_slot: bool


class DropParked(Struct, frozen=True, kw_only=True, tag=True):
    """Forget a page or a checkpoint."""

    page_id: int | None = None
    checkpoint_id: int | None = None


class StageReady(Struct, frozen=True, kw_only=True, tag=True):
    """The stage is loaded and waits for the others."""

    kernels: str
    memory_plan: tuple[PlanItem, ...]
    page_bytes: int
    checkpoint_bytes: int


class StageFailed(Struct, frozen=True, kw_only=True, tag=True):
    """The stage raised; its process ends."""

    kind: str
    """The exception's class name."""
    message: str


class StageLog(Struct, frozen=True, kw_only=True, tag=True):
    """One log record."""

    level: int
    text: str


Order = (
    LoadStage
    | BeginSlot
    | ClearSlot
    | StageWindow
    | StageChunk
    | StageCommit
    | MovePages
    | MoveCheckpoint
    | DropParked
)
Report = StageReady | StageFailed | StageLog

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Order | Report] = msgspec.msgpack.Decoder(Order | Report)


class StagePipe:
    """Blocking messages over a socket; one thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: Order | Report) -> None:
        """Raises OSError when the other side is gone."""
        body = _ENCODER.encode(message)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Order | Report | None:
        """The next message, or None when the other side is gone. Raises msgspec.DecodeError."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        body = self._read(_LENGTH.unpack(header)[0])
        return None if body is None else _DECODER.decode(body)

    def close(self) -> None:
        """The other side sees the end, and so does a thread of this one that waits for a message."""
        with contextlib.suppress(OSError):  # the other side is gone already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._sock.recv(size - len(data))
            except OSError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)
