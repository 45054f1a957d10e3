"""What a misbehaving engine process looks like to the scheduler."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import Process
from typing import cast

import pytest

from engine.interface import WindowPlan
from engine.wire import Close, LoadFailed, Message, Ready, encode
from scheduler import engine_client
from scheduler.config import SchedulerConfig
from scheduler.engine_client import ProcessLink, launch_process
from scheduler.errors import EngineDead, EngineStartFailed
from tests.factories import FAST_SUPERVISION
from tests.unit.scheduler.test_supervisor import INFO

CONFIG = SchedulerConfig(supervision=FAST_SUPERVISION)
READY = encode(Ready(info=INFO))


@pytest.fixture
def impostor(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the process answers to its first, second, ... message; then it closes its socket and sleeps."""
    answers: list[bytes] = []

    async def spawn(sock: socket.socket) -> Process:
        code = (
            "import socket, sys, time\n"
            f"sock = socket.socket(fileno={sock.fileno()})\n"
            f"for answer in {answers!r}:\n"
            "    sock.recv(65536)\n"
            "    sock.sendall(answer)\n"
            "sock.recv(65536)\n"
            "sock.close()\n"
            "time.sleep(60)\n"
        )
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", code), pass_fds=(sock.fileno(),)
        )

    monkeypatch.setattr(engine_client, "_spawn", spawn)
    return answers


async def load_error(impostor: list[bytes], *answers: bytes) -> str:
    impostor.extend(answers)
    with pytest.raises(EngineStartFailed) as caught:
        await launch_process(CONFIG)
    return str(caught.value)


async def window_error(impostor: list[bytes], *answers: bytes) -> str:
    impostor.extend((READY, *answers))
    link = await launch_process(CONFIG)
    with pytest.raises(EngineDead) as caught:
        await link.run_window(WindowPlan())
    await link.close(0.05)
    return str(caught.value)


async def test_noise_while_loading(impostor: list[bytes]) -> None:
    assert "sent a frame of unknown kind ff" in await load_error(impostor, b"\0\0\0\1\xff")


async def test_the_wrong_answer_while_loading(impostor: list[bytes]) -> None:
    assert "unexpected Close" in await load_error(impostor, encode(Close()))


async def test_a_closed_socket_while_loading(impostor: list[bytes]) -> None:
    assert "closed its socket while loading" in await load_error(impostor)


@pytest.mark.parametrize("message", [Close(), LoadFailed(kind="x", message="y")])
async def test_the_wrong_answer_to_a_window(impostor: list[bytes], message: Message) -> None:
    assert type(message).__name__ in await window_error(impostor, encode(message))


async def test_a_frame_that_is_too_long(impostor: list[bytes]) -> None:
    assert "4294967295 bytes" in await window_error(impostor, b"\xff\xff\xff\xff")


async def test_half_an_answer(impostor: list[bytes]) -> None:
    whole = encode(Ready(info=INFO))
    impostor.extend((whole[:20], b""))
    loading = asyncio.create_task(launch_process(CONFIG))
    await asyncio.sleep(0.2)
    assert not loading.done()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading


async def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(EngineStartFailed, match="cannot start the engine process"):
        await launch_process(CONFIG)


class Undead:
    """A process stuck in a device driver: signals do nothing."""

    pid = 0
    returncode = None

    def kill(self) -> None:
        pass

    async def wait(self) -> int:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_process_that_cannot_be_killed_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "_REAP_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        loop = asyncio.get_running_loop()
        undead = cast("Process", Undead())
        _, pipe = await loop.create_unix_connection(lambda: engine_client._Pipe(undead), sock=ours)
        link = ProcessLink(pipe, INFO)
        waiting = asyncio.create_task(link.wait_dead())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        link.kill()
        assert await waiting == "the engine process cannot be killed"
        await link.close(0.01)
