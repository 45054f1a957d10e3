"""One server's life: load, listen, report, serve, drain, stop.

Owns the process's signals: the first SIGTERM or SIGINT drains, the second aborts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console

from gateway.app import build_app
from gateway.errors import ConfigError, TokenizerError
from gateway.heads import KEEP_ALIVE_S, of_one_server
from gateway.json_log import JsonFormatter
from gateway.metrics import Metrics
from gateway.model_files import load_model_files
from gateway.preparation import Preparer
from gateway.report import print_report
from gateway.routes import Service
from gateway.text_files import text_directory
from gateway.tracing import open_tracer
from scheduler.errors import EngineStartFailed
from scheduler.factory import build_scheduler

if TYPE_CHECKING:
    from collections.abc import Generator

    from starlette.applications import Starlette

    from gateway.config import AppConfig, GatewayConfig
    from gateway.h11_protocol import PlainHttpProtocol
    from gateway.http_protocol import BoundedHttpProtocol
    from gateway.model_files import ModelFiles
    from gateway.tracing import RequestTracer
    from scheduler.config import SchedulerConfig
    from scheduler.service import Scheduler

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FLUSH_S = 2.0
"""How long the last frames may take to leave after the sequences have ended."""
_log = logging.getLogger("stratagate.server")


def run_server(config: AppConfig, version: str) -> int:
    """Serve until told to stop; returns the exit status."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if config.gateway.log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    )
    logging.basicConfig(level=config.gateway.log_level.upper(), handlers=[handler])
    for name in ("httpx", "asyncio", "uvicorn.error", "sse_starlette"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, version))
    except (ConfigError, TokenizerError, EngineStartFailed) as error:
        sys.stderr.write(f"stratagate: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def _serve(config: AppConfig, version: str) -> int:
    started_s = time.monotonic()
    endpoint = config.gateway.otlp_endpoint
    tracer = None if endpoint is None else open_tracer(endpoint, version)
    listener = take_address(config.gateway)
    # Before the listener closes nothing reads text files any more, a restarted engine included.
    texts = ExitStack()
    try:
        directory = texts.enter_context(text_directory(config.scheduler.engine))
        files = load_model_files(directory)
        scheduler = build_scheduler(with_text(config.scheduler, files))
        with _cancelled_by(signal.SIGTERM):
            await scheduler.start()
    except BaseException:
        texts.close()
        listener.close()
        raise
    try:
        with _cancelled_by(signal.SIGTERM):
            service = build_service(config.gateway, scheduler, files, version, tracer)
            server = GracefulServer(build_app(service), scheduler, config.gateway)
        server.take_signals()
        # Who reads the report may connect at once; uvicorn takes over what has queued by then.
        listener.listen(server.config.backlog)
        print_report(
            Console(stderr=True),
            service,
            url=url_of(listener),
            ready_s=time.monotonic() - started_s,
        )
        # What is loaded stays: a full collection that walks all of it stops every stream for 30 ms.
        gc.collect()
        gc.freeze()
        return await server.serve_on(listener)
    finally:
        await scheduler.stop(0.0)
        texts.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


@contextmanager
def _cancelled_by(sig: signal.Signals) -> Generator[None]:
    """A signal ends the current task as an interrupt from the keyboard does, so that what it started is cleaned up."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(sig, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(sig)


def with_text(config: SchedulerConfig, files: ModelFiles) -> SchedulerConfig:
    """The scheduler cuts prompts at turns, whose id only the vocabulary knows; the engine reads the same files."""
    engine = replace(config.engine, text_dir=str(files.directory))
    return replace(config, engine=engine, turn_token_id=files.turn_token_id)


def build_service(
    config: GatewayConfig,
    scheduler: Scheduler,
    files: ModelFiles,
    version: str,
    tracer: RequestTracer | None = None,
) -> Service:
    """The endpoints' service over a started scheduler."""
    info = scheduler.info
    largest = max((token.id for token in files.tokenizer.control_tokens), default=0)
    if largest >= info.vocab_size:
        raise TokenizerError(
            f"the tokenizer has id {largest}, but the model's head has {info.vocab_size} rows"
        )
    return Service(
        config=config,
        scheduler=scheduler,
        files=files,
        preparer=Preparer(files, info),
        metrics=Metrics(scheduler.stats),
        model=config.served_model_name or info.model_name,
        created=int(time.time()),
        version=version,
        tracer=tracer,
    )


def take_address(config: GatewayConfig) -> socket.socket:
    """Take the address before anything slow happens; clients are let in when the server is ready.

    Raises ConfigError naming it.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --host {config.host} --port {config.port}: {error.strerror}"
        ) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a browser finds the listener."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _http_protocol() -> type[BoundedHttpProtocol] | type[PlainHttpProtocol]:
    """Over httptools where that is there."""
    try:
        from gateway.http_protocol import BoundedHttpProtocol
    except ImportError:
        from gateway.h11_protocol import PlainHttpProtocol

        return PlainHttpProtocol
    return BoundedHttpProtocol


class GracefulServer(uvicorn.Server):
    """uvicorn that keeps answering while it drains.

    On the first signal new generations get 503 and running ones have `drain_s` seconds; then the scheduler fails
    the rest, their last frames leave, and uvicorn stops. The second signal stops at once.
    """

    def __init__(self, app: Starlette, scheduler: Scheduler, config: GatewayConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                http=of_one_server(_http_protocol()),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(_FLUSH_S),
                h11_max_incomplete_event_size=64 * 1024,
            )
        )
        self._scheduler = scheduler
        self._drain_s = config.drain_s
        self._exit_status = EXIT_OK
        self._stopping: asyncio.Task[None] | None = None

    def take_signals(self) -> None:
        """Drain on a signal from now until it has served: a server that says it is ready is to be ended as one."""
        loop = asyncio.get_running_loop()
        for sig in _STOP_SIGNALS:
            loop.add_signal_handler(sig, self.begin_stop, sig)

    async def serve_on(self, listener: socket.socket) -> int:
        """Serve on a listener until stopped; returns the exit status."""
        self.take_signals()
        watching = asyncio.create_task(self._watch_fatal(), name="fatal watch")
        try:
            await self.serve(sockets=[listener])
        finally:
            watching.cancel()
            for sig in _STOP_SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(sig)
            if self._stopping is not None:
                self._stopping.cancel()
                with suppress(asyncio.CancelledError):  # just asked for
                    await self._stopping
        return self._exit_status

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """uvicorn's own handlers, which other libraries hook to cut streams, are not wanted: see take_signals."""
        yield

    def begin_stop(self, sig: int) -> None:
        """Drain; called again, abort."""
        if self._stopping is None:
            _log.warning(
                "stopping: running requests have %.0f s; a second signal aborts", self._drain_s
            )
            self._stopping = asyncio.create_task(self._stop(self._drain_s), name="drain")
            return
        _log.warning("aborting")
        self._exit_status = 128 + sig
        self._stopping.cancel()
        self.should_exit = True
        self.force_exit = True

    async def _stop(self, drain_s: float) -> None:
        await self._scheduler.stop(drain_s)
        with suppress(TimeoutError):  # a reader that takes nothing cannot hold up the end
            async with asyncio.timeout(_FLUSH_S):
                while self.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.02)
        self.should_exit = True

    async def _watch_fatal(self) -> None:
        await self._scheduler.fatal.wait()
        _log.error("the engine died too often; stopping")
        self._exit_status = EXIT_FAILED
        self._stopping = self._stopping or asyncio.create_task(self._stop(0.0), name="drain")
