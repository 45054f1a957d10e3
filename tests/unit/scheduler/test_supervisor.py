"""Restart policy: pauses double, many deaths in a short time are fatal, a late error spares the next engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.fake import FakeEngine, FakeScript
from engine.interface import EngineInfo, WindowPlan, WindowResult
from scheduler.config import SupervisionConfig
from scheduler.errors import EngineDead, EngineStartFailed
from scheduler.stats import EngineState
from scheduler.supervisor import EngineSupervisor
from tests.factories import FAST_SUPERVISION, wait_until

INFO = FakeEngine(FakeScript()).info


class ScriptedLink:
    """A link whose windows never end by themselves."""

    def __init__(self) -> None:
        self.dead = asyncio.Event()
        self.error: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self.closed = False

    @property
    def info(self) -> EngineInfo:
        return INFO

    async def run_window(self, plan: WindowPlan) -> WindowResult:
        raise await self.error

    async def wait_dead(self) -> str:
        await self.dead.wait()
        return "dead"

    def kill(self) -> None:
        self.dead.set()

    async def close(self, timeout_s: float) -> None:
        self.closed = True
        self.kill()


class Launcher:
    """Hands out links, or errors where told."""

    def __init__(self) -> None:
        self.links: list[ScriptedLink] = []
        self.errors: dict[int, EngineStartFailed] = {}
        self.num_launches = 0

    async def __call__(self) -> ScriptedLink:
        number = self.num_launches
        self.num_launches += 1
        if number in self.errors:
            raise self.errors[number]
        self.links.append(ScriptedLink())
        return self.links[-1]


@asynccontextmanager
async def supervised(
    launcher: Launcher, config: SupervisionConfig = FAST_SUPERVISION
) -> AsyncGenerator[EngineSupervisor]:
    supervisor = EngineSupervisor(launcher, config, asyncio.Event())
    running = asyncio.create_task(supervisor.run())
    yield supervisor
    running.cancel()
    await asyncio.wait((running,))


def is_ready(supervisor: EngineSupervisor) -> Callable[[], bool]:
    return lambda: supervisor.state is EngineState.READY


async def test_a_dead_engine_is_replaced_and_its_link_closed() -> None:
    launcher = Launcher()
    async with supervised(launcher) as supervisor:
        await supervisor.started
        launcher.links[0].kill()
        await wait_until(lambda: len(launcher.links) == 2)
        await wait_until(is_ready(supervisor))
        assert launcher.links[0].closed
        assert supervisor.restarts == 1
    assert launcher.links[1].closed
    assert supervisor.state is EngineState.CLOSED


async def test_an_error_that_comes_late_spares_the_next_engine() -> None:
    launcher = Launcher()
    async with supervised(launcher) as supervisor:
        await supervisor.started
        window = asyncio.create_task(supervisor.run_window(WindowPlan()))
        await asyncio.sleep(0)
        launcher.links[0].kill()
        await wait_until(lambda: len(launcher.links) == 2)
        launcher.links[0].error.set_result(EngineDead("at last"))
        with pytest.raises(EngineDead, match="at last"):
            await window
        assert supervisor.state is EngineState.READY
        assert not launcher.links[1].dead.is_set()


async def test_without_an_engine_a_window_fails_at_once() -> None:
    launcher = Launcher()
    async with supervised(launcher, replace(FAST_SUPERVISION, first_backoff_s=60.0)) as supervisor:
        await supervisor.started
        supervisor.kill()
        supervisor.kill()
        assert supervisor.state is EngineState.RESTARTING
        with pytest.raises(EngineDead, match="not running"):
            await supervisor.run_window(WindowPlan())


async def test_pauses_double_up_to_the_largest() -> None:
    config = replace(FAST_SUPERVISION, first_backoff_s=0.001, max_backoff_s=0.004, max_deaths=99)
    launcher = Launcher()
    pauses: list[float] = []
    async with supervised(launcher, config) as supervisor:
        await supervisor.started
        for number in range(5):
            launcher.links[number].kill()
            await wait_until(lambda number=number: len(launcher.links) == number + 2)
            pauses.append(supervisor._backoff_s)
    assert pauses == pytest.approx([0.001, 0.002, 0.004, 0.004, 0.004])


async def test_a_restart_that_fails_to_load_counts_as_a_death() -> None:
    launcher = Launcher()
    launcher.errors = {1: EngineStartFailed("no memory"), 2: EngineStartFailed("no memory")}
    fatal = asyncio.Event()
    supervisor = EngineSupervisor(launcher, replace(FAST_SUPERVISION, max_deaths=3), fatal)
    running = asyncio.create_task(supervisor.run())
    await supervisor.started
    launcher.links[0].kill()
    await running
    assert fatal.is_set()
    assert supervisor.state is EngineState.FAILED


async def test_old_deaths_are_forgiven() -> None:
    launcher = Launcher()
    config = replace(FAST_SUPERVISION, max_deaths=2, death_window_s=0.0)
    async with supervised(launcher, config) as supervisor:
        for number in range(4):
            await wait_until(lambda number=number: len(launcher.links) > number)
            launcher.links[number].kill()
        await wait_until(lambda: len(launcher.links) == 5)
        await wait_until(is_ready(supervisor))


async def test_a_first_load_that_fails_is_final() -> None:
    launcher = Launcher()
    launcher.errors = {0: EngineStartFailed("no such file", kind="ModelLoadError")}
    async with supervised(launcher) as supervisor:
        with pytest.raises(EngineStartFailed, match="^no such file"):
            await supervisor.started
    assert launcher.num_launches == 1
    assert supervisor.state is EngineState.FAILED


async def test_retry_after_covers_loading_and_the_pause() -> None:
    launcher = Launcher()
    async with supervised(launcher) as supervisor:
        assert supervisor.retry_after_s > 1.0  # nothing measured: a guess
        await supervisor.started
        assert supervisor.retry_after_s == 1.0  # the scripted engine loads in no time
