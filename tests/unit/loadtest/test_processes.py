"""A server's processes, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from loadtest.processes import ProcessError, ServerProcesses

PARENT = """
import subprocess, sys
child = "import time; data = bytearray(30_000_000); print('up', flush=True); time.sleep(60)"
subprocess.run([sys.executable, "-c", child, "engine.worker"])
subprocess.run([sys.executable, "-c", child, "other"])
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def test_memory_of_server_and_engine_are_told_apart(server: subprocess.Popen[bytes]) -> None:
    found = ServerProcesses(server.pid).memory(time_s=3.0)
    assert found.time_s == 3.0
    assert found.engine_bytes > 30_000_000 > found.server_bytes > 1_000_000


def test_only_the_engine_is_killed(server: subprocess.Popen[bytes]) -> None:
    processes = ServerProcesses(server.pid)
    assert processes.kill_engine()
    assert server.stdout is not None
    assert server.stdout.readline() == b"up\n"  # the next child; the parent lives
    assert processes.memory(time_s=0.0).engine_bytes == 0
    assert not processes.kill_engine()


def test_a_process_that_is_not_there_is_named(server: subprocess.Popen[bytes]) -> None:
    processes = ServerProcesses(server.pid)
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    deadline_s = time.monotonic() + 5
    with pytest.raises(ProcessError, match=str(server.pid)):
        while time.monotonic() < deadline_s:
            processes.memory(time_s=0.0)
    with pytest.raises(ProcessError, match=f"no process {server.pid}"):
        ServerProcesses(server.pid)
