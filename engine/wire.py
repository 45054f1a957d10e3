"""The engine process's messages as bytes: length-prefixed frames of one tag byte and a MessagePack body.

No pickle: a frame can only become one of the message types below, with every field's type checked. Knows no
socket and no engine, so both sides and both styles (blocking, asyncio) use it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from engine.config import EngineConfig  # noqa: TC001 (msgspec reads annotations)
from engine.fake import FakeScript  # noqa: TC001
from engine.interface import EngineInfo, WindowPlan, WindowResult  # noqa: TC001

MAX_FRAME_BYTES = 16 * 2**20
"""Far above the largest honest message: a prompt chunk, or 20 rows of logprobs."""

_HEADER = struct.Struct(">I")
HEADER_BYTES = _HEADER.size


class WireError(Exception):
    """A frame that is too long, truncated, of an unknown kind, or with a field of the wrong type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """First message to the process: what to load."""

    config: EngineConfig
    scripted: FakeScript | None
    """Run the scripted engine instead of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWindow:
    """Run one window; answered by WindowDone or WindowFailed."""

    plan: WindowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Free everything and exit with status 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One log record of the engine, at any time between a request and its answer."""

    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine is loaded."""

    info: EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    """The engine cannot be loaded; the process exits."""

    kind: str
    """The exception's class name."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDone:
    """Answer to RunWindow."""

    result: WindowResult


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFailed:
    """The window raised."""

    kind: str
    """The exception's class name."""
    message: str
    fatal: bool
    """The process exits; else nothing was run and the slots are as they were."""


ToEngine = Load | RunWindow | Close
FromEngine = LogLine | Ready | LoadFailed | WindowDone | WindowFailed
Message = ToEngine | FromEngine

_TYPES: tuple[type[Message], ...] = (
    Load,
    RunWindow,
    Close,
    LogLine,
    Ready,
    LoadFailed,
    WindowDone,
    WindowFailed,
)
_TAGS = {message_type: tag for tag, message_type in enumerate(_TYPES)}
_DECODERS = tuple(msgspec.msgpack.Decoder(message_type, strict=True) for message_type in _TYPES)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The whole frame, header included."""
    body = _ENCODER.encode(message)
    length = 1 + len(body)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return b"".join((_HEADER.pack(length), bytes((_TAGS[type(message)],)), body))


def payload_length(header: bytes | bytearray) -> int:
    """How many bytes follow a frame's header."""
    (length,) = _HEADER.unpack(header)
    if not 1 <= length <= MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes; allowed are 1 to {MAX_FRAME_BYTES}")
    return length


def decode(payload: bytes | bytearray) -> Message:
    """The message of one frame's payload."""
    if not payload or payload[0] >= len(_TYPES):
        raise WireError(f"a frame of unknown kind {payload[:1].hex() or 'empty'}")
    try:
        return _DECODERS[payload[0]].decode(memoryview(payload)[1:])
    except msgspec.DecodeError as error:
        raise WireError(f"a damaged {_TYPES[payload[0]].__name__} frame: {error}") from error


class FrameReader:
    """Bytes as they come from a socket to messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now. Raises WireError; nothing can be read after that."""
        self._data += data
        messages: list[Message] = []
        start = 0
        while len(self._data) >= start + HEADER_BYTES:
            begin = start + HEADER_BYTES
            end = begin + payload_length(self._data[start:begin])
            if len(self._data) < end:
                break
            messages.append(decode(self._data[begin:end]))
            start = end
        del self._data[:start]
        return messages
