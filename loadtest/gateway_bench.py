"""What the gateway costs: many streams of a scripted engine, against a bare Starlette app that sends the same bytes.

    python -m loadtest.gateway_bench [--streams 64] [--chunks 300] [--rounds 3]

Server, app and client are processes of their own; only HTTP passes between them. Two figures: chunks a second when
both send as fast as they can, and how much later than the app's the gateway's slowest chunks come when both are given
one chunk per stream every --period-ms.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

_GATEWAY = """
import sys
from dataclasses import replace
from engine.fake import FakeScript
from gateway.config import ServeOptions, load_config
from gateway.server import run_server
config = load_config(ServeOptions(port={port}, batch=64, log_level="warning"))
script = FakeScript(num_slots={streams}, max_context=65536, decode_s={period_s}, output_ids=(300, 301, 302, 303))
config = replace(config, scheduler=replace(config.scheduler, scripted=script))
sys.exit(run_server(config, "bench"))
"""
_BARE = """
import asyncio, time
from pathlib import Path
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
frames = Path({frames!r}).read_bytes().split(b"\\n\\n")[:-1]
frames = [frame + b"\\n\\n" for frame in frames]
async def send():
    due_s = time.monotonic()
    for frame in frames:
        due_s += {period_s}
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        yield frame
async def stream(request):
    await request.body()
    return StreamingResponse(send(), media_type="text/event-stream")
async def ready(request):
    return PlainTextResponse("ready")
app = Starlette(routes=[Route("/v1/chat/completions", stream, methods=["POST"]), Route("/ready", ready)])
uvicorn.run(app, port={port}, log_level="warning", access_log=False)
"""


@dataclass(slots=True)
class Stream(asyncio.Protocol):
    """One request on a bare socket: when its chunks came, and their bytes if they are kept."""

    request: bytes
    done: asyncio.Future[None]
    keeps: bool = False
    times_s: list[float] = field(default_factory=list[float])
    data: bytearray = field(default_factory=bytearray)
    _transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.times_s += [time.monotonic()] * data.count(b"data: ")
        if self.keeps:
            self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one server did in one round."""

    chunks_per_s: float
    chunks_per_cpu_s: float
    p50_gap_ms: float
    p99_gap_ms: float


def request_of(port: int, num_tokens: int) -> bytes:
    """A POST whose connection ends with the answer."""
    body = json.dumps(
        {
            "model": "default",
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": True,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "spec": 0,
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (port, len(body), body)
    )


async def run_streams(port: int, streams: int, num_tokens: int, *, keeps: bool) -> list[Stream]:
    """All of them at once, to their ends."""
    loop = asyncio.get_running_loop()
    made = [
        Stream(request_of(port, num_tokens), loop.create_future(), keeps) for _ in range(streams)
    ]
    for stream in made:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
    await asyncio.gather(*(stream.done for stream in made))
    return made


def frames_of(raw: bytes) -> bytes:
    """The events of an answer, without headers and chunked framing."""
    body, frames = raw.partition(b"\r\n\r\n")[2], b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        frames += body[:length]
        body = body[length + 2 :]
    return frames


def measured(streams: list[Stream], cpu_s: float) -> Round:
    count = sum(len(stream.times_s) for stream in streams)
    begin = min(stream.times_s[0] for stream in streams)
    end = max(stream.times_s[-1] for stream in streams)
    gaps = [
        (after - before) * 1e3
        for stream in streams
        for before, after in zip(stream.times_s[2:-2], stream.times_s[3:-2], strict=False)
    ]
    cuts = statistics.quantiles(gaps, n=100)
    return Round(
        chunks_per_s=count / (end - begin),
        chunks_per_cpu_s=count / max(cpu_s, 1e-3),
        p50_gap_ms=cuts[49],
        p99_gap_ms=cuts[98],
    )


@contextmanager
def server(code: str, port: int) -> Generator[int]:
    """A server process, ready; yields its id."""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        _wait_ready(process, port)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if b" 200 " in connection.recv(100):
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit("a server did not become ready")


def cpu_s_of(pid: int) -> float:
    """Processor seconds of one process so far; 0 where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def one_round(code: str, port: int, streams: int, chunks: int) -> Round:
    with server(code, port) as pid:
        asyncio.run(run_streams(port, streams, 20, keeps=False))
        before_s = cpu_s_of(pid)
        made = asyncio.run(run_streams(port, streams, chunks, keeps=False))
        return measured(made, cpu_s_of(pid) - before_s)


def compare(
    streams: int, chunks: int, period_s: float, rounds: int, frames: Path
) -> tuple[Round, Round]:
    """Medians of (gateway, bare app), their rounds taking turns."""
    ours: list[Round] = []
    bare: list[Round] = []
    for _ in range(rounds):
        port = free_port()
        code = _GATEWAY.format(port=port, streams=streams, period_s=period_s)
        ours.append(one_round(code, port, streams, chunks))
        port = free_port()
        code = _BARE.format(port=port, frames=str(frames), period_s=period_s)
        bare.append(one_round(code, port, streams, chunks))
    return _median(ours), _median(bare)


def _median(rounds: list[Round]) -> Round:
    def of(name: str) -> float:
        return statistics.median(getattr(one, name) for one in rounds)

    return Round(
        chunks_per_s=of("chunks_per_s"),
        chunks_per_cpu_s=of("chunks_per_cpu_s"),
        p50_gap_ms=of("p50_gap_ms"),
        p99_gap_ms=of("p99_gap_ms"),
    )


def record(chunks: int, path: Path) -> None:
    """One answer of the gateway, for the bare app to repeat."""
    port = free_port()
    with server(_GATEWAY.format(port=port, streams=1, period_s=0.0), port):
        (stream,) = asyncio.run(run_streams(port, 1, chunks, keeps=True))
    path.write_bytes(frames_of(bytes(stream.data)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--period-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        frames = Path(directory) / "frames"
        record(given.chunks, frames)
        fast = compare(given.streams, given.chunks, 0.0, given.rounds, frames)
        paced = compare(given.streams, given.chunks, given.period_ms / 1e3, given.rounds, frames)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    ratio = fast[0].chunks_per_s / fast[1].chunks_per_s
    cpu_ratio = fast[0].chunks_per_cpu_s / fast[1].chunks_per_cpu_s
    lines = [
        f"{when}, {os.cpu_count()} cores, {platform.machine()}, load average {load}",
        f"{given.streams} streams of {given.chunks} chunks, {given.rounds} rounds, medians",
        f"chunks/s: gateway {fast[0].chunks_per_s:,.0f}, bare {fast[1].chunks_per_s:,.0f}: {ratio:.2f}x",
        f"chunks per processor second of the server: gateway {fast[0].chunks_per_cpu_s:,.0f}, "
        f"bare {fast[1].chunks_per_cpu_s:,.0f}: {cpu_ratio:.2f}x",
        f"every {given.period_ms:g} ms: p50 gap {paced[0].p50_gap_ms:.1f} against {paced[1].p50_gap_ms:.1f} ms, "
        f"p99 gap {paced[0].p99_gap_ms:.1f} against {paced[1].p99_gap_ms:.1f} ms: "
        f"{paced[0].p99_gap_ms - paced[1].p99_gap_ms:+.1f} ms",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
