"""The processes of a server on this machine, seen from outside: their memory, and a way to kill its engine.

Reads /proc, so this is for Linux; the rest of the load test needs only HTTP.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_ENGINE = b"engine.worker"
"""In the command line of a stratagate engine process."""


class ProcessError(Exception):
    """A process that is not there, or that cannot be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Anonymous resident bytes (RssAnon): what a process holds itself, without mapped files."""

    time_s: float
    server_bytes: int
    engine_bytes: int
    """0 while no engine runs."""


class ServerProcesses:
    """A server's main process and its children."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessError when there is no such process."""
        self._pid = pid
        _anonymous_bytes(pid)

    def memory(self, *, time_s: float) -> MemorySample:
        """Raises ProcessError when the server is gone."""
        engine_bytes = 0
        for pid in self._engines():
            with contextlib.suppress(ProcessError):  # killed since it was listed: holds nothing
                engine_bytes += _anonymous_bytes(pid)
        return MemorySample(
            time_s=time_s, server_bytes=_anonymous_bytes(self._pid), engine_bytes=engine_bytes
        )

    def kill_engine(self) -> bool:
        """SIGKILL to the engine; False when none runs now."""
        engines = self._engines()
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):  # dead already, as wanted
                os.kill(pid, signal.SIGKILL)
        return bool(engines)

    def _engines(self) -> list[int]:
        found: list[int] = []
        for task in (_PROC / str(self._pid) / "task").glob("*"):
            with contextlib.suppress(OSError):  # a thread that ended while they were listed
                children = (task / "children").read_text().split()
                found += [int(child) for child in children if _is_engine(child)]
        return found


def _is_engine(pid: str) -> bool:
    """A killed one that is not reaped yet has no command line and is none."""
    return _ENGINE in (_PROC / pid / "cmdline").read_bytes().split(b"\0")


def _anonymous_bytes(pid: int) -> int:
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError as error:
        raise ProcessError(f"no process {pid} to look at under {_PROC}: {error}") from error
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessError(f"process {pid} has ended")
