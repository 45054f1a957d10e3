"""Scheduler: all that the gateway sees, with messages.py, config.py and errors.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from scheduler.errors import (
    Draining,
    EngineDead,
    EngineStartFailed,
    EngineUnavailable,
    RequestTooLong,
)
from scheduler.loop import SchedulerLoop
from scheduler.roster import Roster
from scheduler.stats import Counters, EngineState, SchedulerStats
from scheduler.supervisor import EngineSupervisor, LaunchEngine

if TYPE_CHECKING:
    from engine.interface import EngineInfo
    from scheduler.config import SchedulerConfig
    from scheduler.handle import RequestHandle
    from scheduler.messages import GenerateRequest

_LOG = logging.getLogger(__name__)


class Scheduler:
    """Packs requests into the slots of one engine. Use from one event loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        launch: LaunchEngine,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._launch = launch
        self._clock = clock
        self._engine: EngineSupervisor | None = None
        self._roster: Roster | None = None
        self._loop: SchedulerLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._drained_by_s: float | None = None
        self.fatal = asyncio.Event()
        """Set when the engine died too often: the server should exit."""

    async def start(self) -> None:
        """Load the engine; returns when requests can be taken. Raises EngineStartFailed.

        Failed or cancelled, nothing is left running.
        """
        assert self._task is None, "started twice"
        engine = EngineSupervisor(self._launch, self._config.supervision, self.fatal)
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._task = asyncio.create_task(self._run(engine, started), name="scheduler")
        try:
            await asyncio.wait((self._task, started), return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                self._task.result()
            started.result()
        except BaseException:
            await self.stop(0.0)
            raise

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let the admitted ones finish for drain_s seconds, fail the rest, close the engine.

        Cancelled, the drain ends and the engine is killed.
        """
        self._drained_by_s = self._clock() + drain_s
        try:
            if self._loop is not None and drain_s > 0:
                async with asyncio.timeout(drain_s):
                    await self._loop.wait_idle()
        except TimeoutError:
            pass
        finally:
            if self._roster is not None:
                self._roster.fail_all(self._draining())
            if self._task is not None:
                await self._end(self._task)

    def submit(
        self, request: GenerateRequest, leader: RequestHandle | None = None
    ) -> RequestHandle:
        """Queue a request. Raises Draining, EngineUnavailable, RequestTooLong or Overloaded.

        leader: of a request with the same prompt and owner, submitted before; the prompt is read once for both.
        """
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        assert self._roster is not None and self._loop is not None
        prompt_tokens, max_context = len(request.prompt_ids), self.info.max_context
        assert prompt_tokens > 0 and request.max_tokens > 0
        if prompt_tokens + request.max_tokens > max_context:
            raise RequestTooLong(
                prompt_tokens=prompt_tokens,
                max_tokens=request.max_tokens,
                max_context=max_context,
            )
        handle = self._roster.admit(request, leader)
        self._loop.wake()
        return handle

    @property
    def info(self) -> EngineInfo:
        """The engine's facts. Raises EngineUnavailable before the first start is through."""
        engine = self._engine
        if engine is None or engine.info is None:
            raise EngineUnavailable("the engine is starting", retry_after_s=1.0)
        return engine.info

    @property
    def capacity(self) -> int:
        """Requests that slots and queue hold together. Raises EngineUnavailable before the first start is through."""
        return self.info.num_slots + self._config.max_queue

    @property
    def engine_state(self) -> EngineState:
        return EngineState.STARTING if self._engine is None else self._engine.state

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now, if the queue has room."""
        return self.refusal() is None

    def refusal(self) -> Draining | EngineUnavailable | None:
        """Why no request would be taken now, and when to try again."""
        if self._drained_by_s is not None:
            return self._draining()
        if self._loop is not None and self.engine_state is EngineState.READY:
            return None
        return EngineUnavailable(
            f"the engine is {self.engine_state.value}",
            retry_after_s=1.0 if self._engine is None else self._engine.retry_after_s,
        )

    def stats(self) -> SchedulerStats:
        """Everything at this moment."""
        roster = self._roster
        return SchedulerStats(
            queued=0 if roster is None else roster.num_waiting,
            slots=() if roster is None else roster.slot_views(),
            totals=Counters().snapshot() if roster is None else roster.totals(),
            parking=None if roster is None else roster.parking_stats(),
            disk=None if roster is None else roster.disk_stats(),
            engine_state=self.engine_state,
            restarts=0 if self._engine is None else self._engine.restarts,
            draining=self._drained_by_s is not None,
        )

    async def _run(self, engine: EngineSupervisor, started: asyncio.Future[None]) -> None:
        """Owner of the two long-lived tasks; should one of them fail, nobody is left waiting."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.run(), name="engine supervisor")
                try:
                    info = await engine.started
                except EngineStartFailed as error:
                    started.set_exception(error)
                    return
                roster = Roster(self._config, info, self._clock)
                loop = SchedulerLoop(roster, engine, self._clock)
                self._roster, self._loop = roster, loop
                started.set_result(None)
                await loop.run()
        except ExceptionGroup as errors:
            if not started.done():
                raise
            _LOG.critical("the scheduler failed", exc_info=errors)
            self.fatal.set()
            if self._roster is not None:
                self._roster.fail_all(EngineDead("the scheduler failed"))

    async def _end(self, task: asyncio.Task[None]) -> None:
        """Close the engine; when this is cancelled, kill it."""
        task.cancel()
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            raise

    def _draining(self) -> Draining:
        left_s = (self._drained_by_s or 0.0) - self._clock()
        return Draining("the server is shutting down", retry_after_s=max(1.0, left_s))
