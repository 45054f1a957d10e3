"""The only file where asyncio meets the engine process: spawn it, speak its frames, see it die.

Engine errors become the scheduler's here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, cast

import engine
from engine.wire import (
    Close,
    FrameReader,
    Load,
    LoadFailed,
    LogLine,
    Message,
    Ready,
    RunWindow,
    ToEngine,
    WindowDone,
    WindowFailed,
    WireError,
    encode,
)
from scheduler.errors import EngineDead, EngineStartFailed
from scheduler.supervisor import WindowRefused

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from engine.interface import EngineInfo, WindowPlan, WindowResult
    from scheduler.config import SchedulerConfig

_ENGINE_LOG = logging.getLogger("engine")
_REAP_S = 5.0
"""A killed process that is not gone by then (stuck in a device driver) is left behind."""
_DEATH_GRACE_S = 0.3
"""A process whose socket is closed has so long to be seen dead before it is killed."""


async def launch_process(config: SchedulerConfig) -> ProcessLink:
    """Start an engine process and return when it is loaded. A LaunchEngine but for the config."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await _spawn(theirs)
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise EngineStartFailed(f"cannot start the engine process: {error}") from error
        raise
    try:
        loop = asyncio.get_running_loop()
        _, pipe = await loop.create_unix_connection(lambda: _Pipe(process), sock=ours)
    except BaseException:
        ours.close()
        _kill(process)
        raise
    try:
        info = await _load(pipe, config)
    except BaseException:
        await pipe.end()
        raise
    return ProcessLink(pipe, info)


async def _spawn(sock: socket.socket) -> Process:
    package_root = str(Path(engine.__path__[0]).parent)
    inherited = os.environ.get("PYTHONPATH")
    python_path = os.pathsep.join((package_root, inherited) if inherited else (package_root,))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "engine.worker", "--fd", str(sock.fileno())),
        pass_fds=(sock.fileno(),),
        stdin=asyncio.subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": python_path},
    )


async def _load(pipe: _Pipe, config: SchedulerConfig) -> EngineInfo:
    timeout_s = config.supervision.load_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            answer = await pipe.ask(Load(config=config.engine, scripted=config.scripted))
    except TimeoutError:
        raise EngineStartFailed(f"loading took longer than {timeout_s:g} s") from None
    except EngineDead as error:
        raise EngineStartFailed(f"{error} while loading") from error
    match answer:
        case Ready(info=info):
            return info
        case LoadFailed(kind=kind, message=message):
            raise EngineStartFailed(message, kind=kind)
        case _:
            raise EngineStartFailed(f"unexpected {type(answer).__name__} while loading")


class ProcessLink:
    """EngineLink to a loaded engine process."""

    def __init__(self, pipe: _Pipe, info: EngineInfo) -> None:
        self._pipe = pipe
        self._info = info
        self._killed = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def pid(self) -> int:
        return self._pipe.process.pid

    async def run_window(self, plan: WindowPlan) -> WindowResult:
        match await self._pipe.ask(RunWindow(plan=plan)):
            case WindowDone(result=result):
                return result
            case WindowFailed(kind=kind, message=message, fatal=False):
                raise WindowRefused(f"{kind}: {message}")
            case WindowFailed(kind=kind, message=message):
                raise EngineDead(f"the engine failed: {kind}: {message}")
            case answer:
                raise EngineDead(f"the engine answered a window with {type(answer).__name__}")

    async def wait_dead(self) -> str:
        dead = asyncio.create_task(self._pipe.wait_dead())
        killed = asyncio.create_task(self._killed.wait())
        try:
            await asyncio.wait((dead, killed), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((dead,), timeout=_REAP_S)
            return dead.result() if dead.done() else "the engine process cannot be killed"
        finally:
            dead.cancel()
            killed.cancel()

    def kill(self) -> None:
        _kill(self._pipe.process)
        self._killed.set()

    async def close(self, timeout_s: float) -> None:
        try:
            with contextlib.suppress(TimeoutError, EngineDead):  # it is killed below in any case
                async with asyncio.timeout(timeout_s):
                    self._pipe.send(Close())
                    await self._pipe.wait_dead()
        finally:
            await self._pipe.end()


class _Pipe(asyncio.Protocol):
    """Frames to and from one process, one question at a time."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._transport: asyncio.WriteTransport | None = None
        self._frames = FrameReader()
        self._messages: deque[Message] = deque()
        self._fault: Exception | None = None
        """Why nothing more can be read."""
        self._news: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except WireError as error:
            self._fail(error)
            return
        for message in messages:
            if isinstance(message, LogLine):
                _ENGINE_LOG.log(message.level, "%s", message.text)
            else:
                self._messages.append(message)
        if self._messages:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the socket was closed"))
        if not self._closed.done():
            self._closed.set_result(None)

    async def ask(self, message: ToEngine) -> Message:
        """Send, then wait for what is not a log line. Raises EngineDead when the process is gone."""
        self.send(message)
        while not self._messages:
            if isinstance(self._fault, WireError):
                raise EngineDead(f"the engine process sent {self._fault}") from self._fault
            if self._fault is not None:
                raise EngineDead(await self._cause_of_death()) from None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._messages.popleft()

    def send(self, message: ToEngine) -> None:
        """Nothing that is sent to a process that is gone is missed: there will be no answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    async def wait_dead(self) -> str:
        status = await self.process.wait()
        if status >= 0:
            return f"the engine process ended with status {status}"
        return f"the engine process was ended by {signal.Signals(-status).name}"

    async def end(self) -> None:
        """Kill and reap the process, close the socket."""
        _kill(self.process)
        if self._transport is not None:
            self._transport.abort()
        with contextlib.suppress(TimeoutError):  # killed; the system reaps it later
            async with asyncio.timeout(_REAP_S):
                await self.process.wait()
        if self._transport is not None:
            await self._closed

    def _fail(self, fault: Exception) -> None:
        self._fault = self._fault or fault
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _cause_of_death(self) -> str:
        try:
            async with asyncio.timeout(_DEATH_GRACE_S):
                return await self.wait_dead()
        except TimeoutError:
            return "the engine process closed its socket"


def _kill(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
            process.kill()
