"""A whole server in this process: real sockets, real scheduler, scripted engine, the default model's text files."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import httpx

from engine.fake import FakeScript
from gateway.app import build_app
from gateway.config import GatewayConfig
from gateway.model_files import load_model_files
from gateway.server import GracefulServer, build_service, take_address, url_of, with_text
from scheduler.config import SchedulerConfig, model_path
from tests.factories import FAST_SUPERVISION, make_scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from gateway.model_files import ModelFiles
    from gateway.tracing import RequestTracer
    from scheduler.service import Scheduler

MODEL = "scripted"
END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A running server."""

    url: str
    scheduler: Scheduler
    server: GracefulServer
    client: httpx.AsyncClient
    task: asyncio.Task[int]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def busy_slots(self) -> int:
        return sum(slot.request_id is not None for slot in self.scheduler.stats().slots)

    async def wait_idle(self) -> None:
        """Until no slot is taken and nothing waits."""
        await until(lambda: not self.busy_slots and not self.scheduler.stats().queued)

    async def wait_busy(self, count: int = 1) -> None:
        """Until so many slots are taken."""
        await until(lambda: self.busy_slots >= count)


async def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that has no event; TimeoutError when it takes too long."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@cache
def default_files() -> ModelFiles:
    """Tokenizer, template and defaults of the shipped model."""
    return load_model_files(model_path("default"))


def ids_of(text: str, *, end: bool = True) -> tuple[int, ...]:
    """Output ids that spell a text; control tokens in it are such."""
    spelled = text + END_OF_TURN if end else text
    return default_files().encoder.encode_plain(spelled, parse_special=True)


def says(text: str, **script: object) -> FakeScript:
    """A script whose every answer is this text."""
    return FakeScript(output_ids=ids_of(text), **script)  # type: ignore[arg-type]


@asynccontextmanager
async def live_server(
    script: FakeScript | None = None,
    *,
    config: GatewayConfig | None = None,
    scheduler_config: SchedulerConfig | None = None,
    headers: dict[str, str] | None = None,
    tracer: RequestTracer | None = None,
) -> AsyncGenerator[Live]:
    """Start a server on a free port; stop it at once on leaving."""
    gateway = config or GatewayConfig(port=0)
    files = default_files()
    chosen = scheduler_config or SchedulerConfig(supervision=FAST_SUPERVISION)
    scheduler = make_scheduler(script or FakeScript(), config=with_text(chosen, files))
    await scheduler.start()
    listener = take_address(gateway)
    url = url_of(listener)
    service = build_service(gateway, scheduler, files, "test", tracer)
    server = GracefulServer(build_app(service), scheduler, gateway)
    task = asyncio.create_task(server.serve_on(listener))
    # Without TLS: its certificates take a tenth of a second to read.
    client = httpx.AsyncClient(base_url=url, headers=headers, timeout=10.0, verify=False)
    try:
        async with client:
            await until(lambda: server.started)
            yield Live(url=url, scheduler=scheduler, server=server, client=client, task=task)
    finally:
        await scheduler.stop(0.0)
        await _end(server, task)


async def _end(server: GracefulServer, task: asyncio.Task[int]) -> None:
    """What uvicorn does when it stops, without the pauses that it makes: they are longer than most tests."""
    await until(lambda: not server.server_state.tasks)
    task.cancel()
    with suppress(asyncio.CancelledError):  # just asked for
        await task
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
    await until(lambda: not server.server_state.connections)


def chat_body(content: object = "Hello", **fields: object) -> dict[str, object]:
    """A small chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
