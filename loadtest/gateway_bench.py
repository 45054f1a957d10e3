"""What the gateway costs: many streams of a scripted engine, against a bare Starlette app that sends the same bytes.

    python -m loadtest.gateway_bench [--streams 64] [--chunks 1000] [--ticks 100] [--rounds 3]

Servers and client are processes of their own; only HTTP passes between them. Two figures. Chunks a second when both
send as fast as they can, counted while every stream runs: between the first chunk of the last one to begin and the
last chunk of the first one to end; processor seconds a chunk say what a busy machine hides. And the delay of chunks
when all streams are given one at once every --period-ms: engine and app do so at multiples of the period on the clock
that the client reads too, so how far behind a multiple a chunk arrives is how long it took from having to being
received. What the gateway adds is the difference of the two.

Beside another process that takes one of two cores a server makes half as many chunks, so that a pair of rounds of which
one was beside it says nothing: each round counts what others took, and disturbed pairs are left out while there are any
without.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
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
script = FakeScript(num_slots={streams}, max_context=65536, tick_s={period_s}, output_ids=(300, 301, 302, 303))
config = replace(config, scheduler=replace(config.scheduler, scripted=script))
sys.exit(run_server(config, "bench"))
"""
_BARE = """
import asyncio, threading, time
from pathlib import Path
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
frames = Path({frames!r}).read_bytes().split(b"\\n\\n")[:-1]
frames = [frame + b"\\n\\n" for frame in frames]
period_s = {period_s}
tick = None
def ticks(loop):
    while True:
        time.sleep(period_s - time.monotonic() % period_s)
        loop.call_soon_threadsafe(fire)
def fire():
    global tick
    tick.set_result(None)
    tick = asyncio.get_running_loop().create_future()
async def send():
    global tick
    if period_s and tick is None:
        loop = asyncio.get_running_loop()
        tick = loop.create_future()
        threading.Thread(target=ticks, args=(loop,), daemon=True).start()
    for frame in frames:
        if tick is None:
            await asyncio.sleep(0)
        else:
            await asyncio.shield(tick)
        yield frame
async def stream(request):
    await request.body()
    return StreamingResponse(send(), media_type="text/event-stream")
async def ready(request):
    return PlainTextResponse("ready")
app = Starlette(routes=[Route("/v1/chat/completions", stream, methods=["POST"]), Route("/ready", ready)])
uvicorn.run(app, port={port}, log_level="warning", access_log=False)
"""


class Watch:
    """Processor seconds of the server and of this process when every stream had begun, and when the first one ended."""

    def __init__(self, pid: int, streams: int) -> None:
        self._pid = pid
        self._num_waiting = streams
        self.begin_s = self.end_s = 0.0
        self.begin_cpu_s = self.end_cpu_s = (0.0, 0.0)

    def begun(self) -> None:
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self.begin_s, self.begin_cpu_s = time.monotonic(), self._cpu_s()

    def ended(self) -> None:
        if self.end_s == 0.0:
            self.end_s, self.end_cpu_s = time.monotonic(), self._cpu_s()

    @property
    def cpu_s(self) -> tuple[float, float]:
        """(server, client) in between."""
        begin, end = self.begin_cpu_s, self.end_cpu_s
        return end[0] - begin[0], end[1] - begin[1]

    def _cpu_s(self) -> tuple[float, float]:
        return cpu_s_of(self._pid), time.process_time()


@dataclass(slots=True)
class Stream(asyncio.Protocol):
    """One request on a bare socket: when its chunks came, and their bytes if they are kept."""

    request: bytes
    done: asyncio.Future[None]
    watch: Watch
    keeps: bool = False
    times_s: list[float] = field(default_factory=list[float])
    data: bytearray = field(default_factory=bytearray)
    _transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        count = data.count(b"data: ")
        if count and not self.times_s:
            self.watch.begun()
        self.times_s += [time.monotonic()] * count
        if self.keeps:
            self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.watch.ended()
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one server did in one round."""

    chunks_per_s: float
    server_us: float
    """Processor microseconds a chunk."""
    client_us: float
    p50_delay_ms: float
    """Of chunks behind the tick that they belong to; 0 without ticks."""
    p99_delay_ms: float
    missed: float
    """Ticks, of all streams, that brought no chunk."""
    others: float
    """Cores that were busy with other processes' work."""


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


async def run_streams(
    port: int, watch: Watch, streams: int, num_tokens: int, *, keeps: bool = False
) -> list[Stream]:
    """All of them at once, to their ends."""
    loop = asyncio.get_running_loop()
    made = [
        Stream(request_of(port, num_tokens), loop.create_future(), watch, keeps)
        for _ in range(streams)
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


def measured(streams: list[Stream], watch: Watch, period_s: float, others: float) -> Round:
    begin_s, end_s = watch.begin_s, watch.end_s
    count = sum(begin_s < at_s <= end_s for stream in streams for at_s in stream.times_s)
    if not count:
        raise SystemExit("the streams did not run at the same time: ask for more chunks")
    server_s, client_s = watch.cpu_s
    # The first and last chunks are of requests that begin and end.
    times = [stream.times_s[2:-2] for stream in streams]
    delays = [at_s % period_s * 1e3 for one in times for at_s in one] if period_s else [0.0, 0.0]
    cuts = statistics.quantiles(delays, n=100)
    return Round(
        chunks_per_s=count / (end_s - begin_s),
        server_us=server_s / count * 1e6,
        client_us=client_s / count * 1e6,
        p50_delay_ms=cuts[49],
        p99_delay_ms=cuts[98],
        missed=sum(_missed(one, period_s) for one in times) if period_s else 0,
        others=others,
    )


def _missed(times_s: list[float], period_s: float) -> int:
    ticks = [int(at_s / period_s) for at_s in times_s]
    return ticks[-1] - ticks[0] + 1 - len(set(ticks))


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
        except OSError:  # it does not listen yet
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


def others_s(pid: int) -> float:
    """Processor seconds so far of all but this process, a server and its engine; 0 where there is no /proc."""
    try:
        first, *_ = Path("/proc/stat").read_text().split("\n", 1)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, first.split()[1:])
    all_s = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return all_s - time.process_time() - sum(cpu_s_of(int(one)) for one in (pid, *children))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server and how it was told to send."""

    pid: int
    port: int
    period_s: float

    def round(self, streams: int, chunks: int) -> Round:
        watch = Watch(self.pid, streams)
        began_s, began_others_s = time.monotonic(), others_s(self.pid)
        done = asyncio.run(run_streams(self.port, watch, streams, chunks))
        others = (others_s(self.pid) - began_others_s) / (time.monotonic() - began_s)
        return measured(done, watch, self.period_s, others)


def compare(
    streams: int, chunks: int, period_s: float, rounds: int, frames: Path
) -> list[tuple[Round, Round]]:
    """Rounds of (gateway, bare app), taking turns; both run all the time."""
    with ExitStack() as stack:
        servers: list[Server] = []
        for code in (_GATEWAY, _BARE):
            port = free_port()
            code = code.format(port=port, streams=streams, period_s=period_s, frames=str(frames))
            pid = stack.enter_context(server(code, port))
            asyncio.run(run_streams(port, Watch(pid, streams), streams, 20))
            servers.append(Server(pid=pid, port=port, period_s=period_s))
        ours, bare = servers
        return [(ours.round(streams, chunks), bare.round(streams, chunks)) for _ in range(rounds)]


_QUIET = 0.15
"""Of a core; clock ticks do not tell less."""


def counted(pairs: list[tuple[Round, Round]]) -> tuple[list[Round], list[Round], str]:
    """The rounds that nothing disturbed, or all if there are none, and what to say of the others."""
    quiet = [pair for pair in pairs if max(one.others for one in pair) < _QUIET]
    most = max(0.0, *(one.others for pair in pairs for one in pair))
    note = f"{len(pairs) - len(quiet)} of {len(pairs)} rounds beside other work, of {most:.2f} cores at most"
    if quiet and len(quiet) < len(pairs):
        note += ", left out"
    ours, bare = zip(*(quiet or pairs), strict=True)
    return list(ours), list(bare), note


def median(rounds: list[Round]) -> Round:
    """Each figure's own."""
    values = (
        statistics.median(getattr(one, part.name) for one in rounds) for part in fields(Round)
    )
    return Round(**dict(zip((part.name for part in fields(Round)), values, strict=True)))


def record(chunks: int, path: Path) -> None:
    """One answer of the gateway, for the bare app to repeat."""
    port = free_port()
    with server(_GATEWAY.format(port=port, streams=1, period_s=0.0), port) as pid:
        (stream,) = asyncio.run(run_streams(port, Watch(pid, 1), 1, chunks, keeps=True))
    path.write_bytes(frames_of(bytes(stream.data)))


def throughput(given: argparse.Namespace, directory: Path) -> list[str]:
    frames = directory / "frames"
    record(given.chunks, frames)
    pairs = compare(given.streams, given.chunks, 0.0, given.rounds, frames)
    ours, bare, note = counted(pairs)
    ratios = sorted(a.chunks_per_s / b.chunks_per_s for a, b in zip(ours, bare, strict=True))
    rounds = " ".join(f"{ratio:.2f}" for ratio in ratios)
    a, b = median(ours), median(bare)
    return [
        f"{given.streams} streams of {given.chunks} chunks, {given.rounds} rounds, medians; {note}",
        f"chunks/s: gateway {a.chunks_per_s:,.0f}, bare {b.chunks_per_s:,.0f}: "
        f"{statistics.median(ratios):.2f}x (rounds {rounds})",
        f"processor us a chunk: gateway {a.server_us:.1f}, bare {b.server_us:.1f}: "
        f"{b.server_us / a.server_us:.2f}x; of the client {a.client_us:.1f} and {b.client_us:.1f}",
    ]


def delay(given: argparse.Namespace, directory: Path) -> list[str]:
    frames = directory / "frames"
    record(given.ticks, frames)
    pairs = compare(given.streams, given.ticks, given.period_ms / 1e3, given.rounds, frames)
    ours, bare, note = counted(pairs)
    added = sorted(a.p99_delay_ms - b.p99_delay_ms for a, b in zip(ours, bare, strict=True))
    a, b = median(ours), median(bare)
    return [
        f"{given.streams} chunks at once, {given.ticks} times every {given.period_ms:g} ms, "
        f"{given.rounds} rounds, medians; {note}",
        f"delay: p50 {a.p50_delay_ms:.1f} ms against {b.p50_delay_ms:.1f}, p99 {a.p99_delay_ms:.1f} against "
        f"{b.p99_delay_ms:.1f}: {statistics.median(added):+.1f} ms (rounds {added[0]:+.1f} to {added[-1]:+.1f}); "
        f"ticks missed {a.missed:g} and {b.missed:g}",
    ]


PARTS = {"throughput": throughput, "delay": delay}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--ticks", type=int, default=100)
    parser.add_argument("--period-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS)
    given = parser.parse_args()
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print_line(f"{when}, {os.cpu_count()} cores, {platform.machine()}, load average {load}")
    with tempfile.TemporaryDirectory() as directory:
        for name, part in PARTS.items():
            if given.only in (None, name):
                for line in part(given, Path(directory)):
                    print_line(line)


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
