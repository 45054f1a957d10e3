"""The engine process: `python -m engine.worker --fd N` answers messages on an inherited socket until it closes.

One thread, the main one, owns the device for its whole life. The process never outlives its parent: the closed
socket ends it between windows, and on Linux the parent's death signal inside one.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from engine.errors import PlanError
from engine.fake import FakeEngine, FakeScript
from engine.wire import (
    Close,
    FrameReader,
    Load,
    LoadFailed,
    LogLine,
    Message,
    Ready,
    RunWindow,
    WindowDone,
    WindowFailed,
    encode,
)

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.interface import Engine

EXIT_OK = 0
EXIT_FAILED = 1

_READ_BYTES = 2**16

_PR_SET_PDEATHSIG = 1
_LOG = logging.getLogger("engine.worker")


class Channel:
    """Blocking frames over a socket. Sending is safe from any thread, receiving from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._frames = FrameReader()
        self._received: deque[Message] = deque()

    def send(self, message: Message) -> None:
        frame = encode(message)
        with self._send_lock:
            self._sock.sendall(frame)

    def receive(self) -> Message | None:
        """The next message, or None when the other side is gone."""
        while not self._received:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                return None
            self._received += self._frames.feed(data)
        return self._received.popleft()


class _ChannelLogHandler(logging.Handler):
    """Sends the engine's log records to the parent, which owns the log."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(LogLine(level=record.levelno, text=self.format(record)))


def serve(channel: Channel) -> int:
    """Load what the first message asks for, then run windows until told to close. Returns the exit status."""
    first = channel.receive()
    if not isinstance(first, Load):
        return EXIT_FAILED
    try:
        engine = build_engine(first.config, first.scripted, channel)
    except Exception as error:
        channel.send(LoadFailed(kind=type(error).__name__, message=str(error)))
        return EXIT_FAILED
    channel.send(Ready(info=engine.info))
    try:
        return _run_windows(channel, engine)
    finally:
        engine.close()


def build_engine(config: EngineConfig, scripted: FakeScript | None, channel: Channel) -> Engine:
    """The engine to run; torch is imported only for a real one."""
    if scripted is not None:
        return FakeEngine(scripted)
    from engine.loading import load_engine

    def stage_lost(message: str) -> NoReturn:
        # The main thread may wait on a device for what never comes, so it is not asked.
        _LOG.error("%s", message)
        channel.send(WindowFailed(kind="StageLost", message=message, fatal=True))
        os._exit(EXIT_FAILED)

    # What was imported stays: the walks over live tensors while the model loads need not look at it.
    gc.freeze()
    return load_engine(config, rehearse=True, on_lost=stage_lost)


def _run_windows(channel: Channel, engine: Engine) -> int:
    while True:
        match channel.receive():
            case RunWindow(plan=plan):
                try:
                    result = engine.run_window(plan)
                except PlanError as error:
                    channel.send(_window_failed(error, fatal=False))
                    continue
                except Exception as error:
                    return _failed(channel, error)
                channel.send(WindowDone(result=result))
                try:
                    engine.work_ahead()
                except Exception as error:
                    return _failed(channel, error)
            case Close() | None:
                return EXIT_OK
            case message:
                _LOG.error("unexpected message %s", type(message).__name__)
                return EXIT_FAILED


def _failed(channel: Channel, error: Exception) -> int:
    """Say why the engine is beyond use, to whoever waits for a window or asks for the next. Returns the exit status."""
    _LOG.error("the window failed", exc_info=error)
    channel.send(_window_failed(error, fatal=True))
    return EXIT_FAILED


def _window_failed(error: Exception, *, fatal: bool) -> WindowFailed:
    return WindowFailed(kind=type(error).__name__, message=str(error), fatal=fatal)


def die_with_parent() -> None:
    """Linux: be killed when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the scheduler")
    arguments = parser.parse_args()
    # Only the scheduler ends this process: a signal to the whole process group must not cut a drain short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    with socket.socket(fileno=arguments.fd) as sock:
        channel = Channel(sock)
        logger = logging.getLogger("engine")
        logger.setLevel(logging.INFO)
        logger.addHandler(_ChannelLogHandler(channel))
        try:
            return serve(channel)
        except (BrokenPipeError, ConnectionResetError):
            return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
