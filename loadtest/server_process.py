"""A server started for a measurement, as a process of its own, and stopped with all its children."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

_POLL_S = 0.02
_STOP_S = 20.0


class StartError(Exception):
    """The server ended or was not ready in time; the message holds the end of its output."""


@dataclass(slots=True, kw_only=True)
class ServerProcess:
    """A running server."""

    process: subprocess.Popen[bytes]
    root_url: str
    start_up_s: float
    """From the start of the process to its first 200 on the ready path."""
    peak_bytes: int = field(default=0)

    def sample_memory(self) -> int:
        """Resident bytes of the process and all its children now; the largest seen is kept.

        Pages that processes share are counted once for each (RSS), so this is an upper bound.
        """
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):  # what has ended holds nothing
            root = psutil.Process(self.process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
        self.peak_bytes = max(self.peak_bytes, total)
        return total


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str], *, port: int, ready_path: str, log: Path, timeout_s: float = 120.0
) -> Generator[ServerProcess]:
    """Start `command`, wait until it is ready, and stop it (SIGTERM, then SIGKILL) at the end."""
    root_url = f"http://127.0.0.1:{port}"
    start_s = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, f"{root_url}{ready_path}", log, start_s + timeout_s)
        yield ServerProcess(
            process=process, root_url=root_url, start_up_s=time.perf_counter() - start_s
        )
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, deadline_s: float
) -> None:
    with httpx.Client(trust_env=False) as http:
        while time.perf_counter() < deadline_s:
            if process.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):  # it does not listen yet
                if http.get(url, timeout=2.0).status_code == 200:
                    return
            time.sleep(_POLL_S)
    tail = log.read_text(errors="replace")[-2000:]
    raise StartError(f"{url} did not answer (exit code {process.poll()}):\n{tail}")
