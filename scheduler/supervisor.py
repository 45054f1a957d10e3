"""Keeps one engine running: start, watch, restart with a pause, give up after repeated deaths.

Knows policy only. How an engine is reached is an EngineLink's business: a process (engine_client.py), or a thread in
tests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from scheduler.errors import EngineDead, EngineStartFailed
from scheduler.stats import EngineState

if TYPE_CHECKING:
    from engine.interface import EngineInfo, KeptFile, WindowPlan, WindowResult
    from scheduler.config import SupervisionConfig

_LOG = logging.getLogger(__name__)
_GUESSED_LOAD_S = 5.0


class WindowRefused(Exception):
    """The engine found that the plan contradicts its slots and ran nothing; it is still usable."""


class EngineLink(Protocol):
    """One loaded engine, from its start to its end."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        ...

    async def run_window(self, plan: WindowPlan) -> WindowResult:
        """Run one window. Raises WindowRefused, or EngineDead when the engine is beyond use.

        Cancelled in between, the link must be closed: the answer that is still to come has no taker.
        """
        ...

    async def wait_dead(self) -> str:
        """Return when the engine has ended, with the reason."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Ask it to end, kill it after timeout_s; it has ended when this returns or is cancelled."""
        ...


LaunchEngine = Callable[[], Awaitable[EngineLink]]
"""Starts an engine and returns when it is loaded. Raises EngineStartFailed; leaves nothing behind when cancelled."""


class EngineSupervisor:
    """The engine that is running now, if one is. `run` must be running for anything to happen."""

    def __init__(
        self, launch: LaunchEngine, config: SupervisionConfig, fatal: asyncio.Event
    ) -> None:
        """`fatal` is set when the engine died too often."""
        self._launch = launch
        self._config = config
        self._fatal = fatal
        self._link: EngineLink | None = None
        self._deaths: deque[float] = deque(maxlen=config.max_deaths)
        self._backoff_s = 0.0
        self.state = EngineState.STARTING
        self.restarts = 0
        self.generation = 0
        """How many engines were ready so far: what one knew is gone with it."""
        self.info: EngineInfo | None = None
        """Of the engine loaded last."""
        self.started: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        """The first engine's info, or EngineStartFailed."""

    @property
    def kept_files(self) -> tuple[KeptFile, ...]:
        """Conversation files that the engine has found when it was loaded."""
        return () if self.info is None else self.info.files

    @property
    def retry_after_s(self) -> float:
        """When an engine that is not ready now may be."""
        load_s = _GUESSED_LOAD_S if self.info is None else self.info.load_s
        return max(1.0, load_s + self._backoff_s)

    async def run(self) -> None:
        """Keep an engine running; returns when that is hopeless, closes the engine when cancelled."""
        try:
            while True:
                reason = await self._live_once()
                if reason is None or self._is_hopeless():
                    break
                self.state = EngineState.RESTARTING
                _LOG.error("%s; restart in %.1f s", reason, self._backoff_s)
                await asyncio.sleep(self._backoff_s)
                self.restarts += 1
        finally:
            if self.state is not EngineState.FAILED:
                self.state = EngineState.CLOSED

    async def run_window(self, plan: WindowPlan) -> WindowResult:
        """Run one window. Raises WindowRefused, or EngineDead: then the engine is being restarted."""
        link = self._link
        if link is None:
            raise EngineDead("the engine is not running")
        try:
            async with asyncio.timeout(self._config.window_timeout_s):
                return await link.run_window(plan)
        except TimeoutError:
            self._drop(link)
            limit_s = self._config.window_timeout_s
            raise EngineDead(f"a window took longer than {limit_s:g} s") from None
        except EngineDead:
            self._drop(link)
            raise

    def kill(self) -> None:
        """End the running engine, if any; `run` starts the next one."""
        if self._link is not None:
            self._drop(self._link)

    def _drop(self, link: EngineLink) -> None:
        """End this engine; the next one may be running already."""
        if self._link is link:
            self._link = None
            self.state = EngineState.RESTARTING
        link.kill()

    async def _live_once(self) -> str | None:
        """One engine from launch to death. Returns why it ended, None if there can be no other."""
        try:
            link = await self._launch()
        except EngineStartFailed as error:
            if self.info is not None:
                return f"the engine did not come back: {error}"
            self.state = EngineState.FAILED
            self.started.set_exception(error)
            return None
        self._link, self.info = link, link.info
        self.generation += 1
        self.state = EngineState.READY
        if not self.started.done():
            self.started.set_result(link.info)
        try:
            return await link.wait_dead()
        finally:
            self._link = None
            self.state = EngineState.RESTARTING
            await link.close(self._config.close_timeout_s)

    def _is_hopeless(self) -> bool:
        """Count a death: too many in a short time are fatal, each sooner one doubles the pause."""
        now = time.monotonic()
        self._deaths.append(now)
        recent = sum(now - death < self._config.death_window_s for death in self._deaths)
        if recent >= self._config.max_deaths:
            _LOG.critical("the engine died %d times, giving up", recent)
            self.state = EngineState.FAILED
            self._fatal.set()
            return True
        pause_s = self._config.first_backoff_s * 2.0 ** (recent - 1)
        self._backoff_s = min(pause_s, self._config.max_backoff_s)
        return False
