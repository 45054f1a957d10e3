"""The loop: give up the overdue, seat, plan, await the engine, apply, publish. One call of the engine at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from scheduler.errors import EngineDead, SlotFailed
from scheduler.supervisor import EngineSupervisor, WindowRefused

if TYPE_CHECKING:
    from scheduler.roster import Roster

_LOG = logging.getLogger(__name__)


class SchedulerLoop:
    """Runs windows while the roster has work, sleeps while it has none."""

    def __init__(
        self, roster: Roster, engine: EngineSupervisor, clock: Callable[[], float]
    ) -> None:
        self._roster = roster
        self._engine = engine
        self._clock = clock
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def wake(self) -> None:
        """The roster has got work."""
        self._idle.clear()
        self._work.set()

    async def wait_idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()

    async def run(self) -> None:
        """Never returns. Cancelled, it leaves the live sequences as they are and the engine's answer unread."""
        while True:
            try:
                await self._run_while_busy()
            except WindowRefused as error:
                _LOG.error("the engine refused a window: %s", error)
                if self._roster.has_flight:
                    # What it has begun for others would come back to seats that are free by then.
                    self._roster.engine_lost(EngineDead(f"the engine refused a window: {error}"))
                    self._engine.kill()
                    continue
                self._roster.window_refused(SlotFailed(f"the engine refused the window: {error}"))
            except EngineDead as error:
                _LOG.error("requests in flight are lost: %s", error)
                self._roster.engine_lost(error)
            except Exception as error:
                # A contradiction between scheduler and engine: start both anew rather than go on with it.
                _LOG.exception("the scheduler loop failed")
                self._roster.engine_lost(EngineDead(f"the scheduler failed: {error!r}"))
                self._engine.kill()
            else:
                self._idle.set()
                await self._work.wait()
                self._work.clear()

    async def _run_while_busy(self) -> None:
        roster = self._roster
        answered_s: float | None = None
        while True:
            roster.follow_engine(self._engine.generation, self._engine.kept_files)
            roster.give_up_overdue()
            roster.seat_waiting()
            plan = roster.plan()
            if plan is None:
                return
            began_s = self._clock()
            gap_s = None if answered_s is None else began_s - answered_s
            result = await self._engine.run_window(plan)
            answered_s = self._clock()
            roster.apply(plan, result, answered_s - began_s, gap_s)
