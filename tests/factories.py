"""Makes what tests need: requests, and a whole scheduler over the scripted engine without a process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from engine.errors import PlanError
from engine.fake import FakeEngine, FakeScript, expected_output
from engine.interface import MAX_SPEC, EngineInfo, SamplingParams, WindowPlan, WindowResult
from scheduler.config import SchedulerConfig, SupervisionConfig
from scheduler.errors import EngineDead, EngineStartFailed
from scheduler.messages import Failed, Finished, GenerateRequest, Tokens
from scheduler.sequence import SequenceState
from scheduler.service import Scheduler
from scheduler.supervisor import EngineLink, WindowRefused

if TYPE_CHECKING:
    from scheduler.handle import RequestHandle

FAST_SUPERVISION = SupervisionConfig(
    load_timeout_s=15.0, close_timeout_s=2.0, first_backoff_s=0.01, max_backoff_s=0.05
)

_request_numbers = itertools.count()


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def make_request(
    *,
    request_id: str | None = None,
    prompt_ids: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 8,
    seed: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    owner: str = "",
    priority: int = 0,
    deadline_s: float | None = None,
    max_draft: int | None = None,
) -> GenerateRequest:
    """A small valid request; for other sampling use dataclasses.replace."""
    return GenerateRequest(
        request_id=request_id or f"request-{next(_request_numbers)}",
        prompt_ids=prompt_ids,
        sampling=SamplingParams(seed=seed, stop_token_ids=stop_token_ids),
        max_tokens=max_tokens,
        owner=owner,
        priority=priority,
        deadline_s=deadline_s,
        max_draft=max_draft,
    )


def make_sequence(
    *,
    arrival: int | None = None,
    prompt_ids: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 8,
    stop_token_ids: tuple[int, ...] = (),
    owner: str = "",
    priority: int = 0,
    deadline_at_s: float | None = None,
    max_draft: int = MAX_SPEC,
) -> SequenceState:
    """A sequence that waits for a seat."""
    request = make_request(
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        owner=owner,
        priority=priority,
    )
    return SequenceState(
        request=request,
        arrival=next(_request_numbers) if arrival is None else arrival,
        deadline_at_s=deadline_at_s,
        max_draft=max_draft,
        spec_min_p=0.5,
    )


def make_scheduler(
    fake: FakeScript | None = None,
    *,
    config: SchedulerConfig | None = None,
    clock: FakeClock | None = None,
) -> Scheduler:
    """A scheduler over a FakeEngine in a thread; the caller starts and stops it."""
    script = fake or FakeScript()
    chosen = config or SchedulerConfig(supervision=FAST_SUPERVISION)
    launch = partial(launch_in_process, script)
    return Scheduler(chosen, launch) if clock is None else Scheduler(chosen, launch, clock=clock)


def expected_ids(fake: FakeScript, request: GenerateRequest) -> tuple[int, ...]:
    """What the scripted engine gives a request that is not disturbed."""
    return expected_output(fake, request.prompt_ids, request.sampling, request.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Everything a handle gave."""

    token_ids: tuple[int, ...]
    last: Finished | Failed | None
    """None: it was cancelled."""


async def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds; the test's own time limit bounds it."""
    while not condition():  # noqa: ASYNC110 (tests look at states that nothing announces)
        await asyncio.sleep(0.002)


async def collect(handle: RequestHandle) -> Collected:
    """Read a handle to its end."""
    token_ids: tuple[int, ...] = ()
    async for event in handle:
        match event:
            case Tokens():
                token_ids += event.token_ids
            case Finished() | Failed():
                return Collected(token_ids=token_ids, last=event)
    return Collected(token_ids=token_ids, last=None)


async def launch_in_process(script: FakeScript) -> EngineLink:
    """A LaunchEngine but for the script: the engine runs in worker threads of this process."""
    try:
        engine = await asyncio.to_thread(FakeEngine, script, die=_die)
    except Exception as error:
        raise EngineStartFailed(str(error), kind=type(error).__name__) from error
    return InProcessLink(engine)


class InProcessLink:
    """EngineLink to a FakeEngine in this process."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._dead = asyncio.Event()
        self._reason = "the scripted engine was killed"

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def run_window(self, plan: WindowPlan) -> WindowResult:
        try:
            return await asyncio.to_thread(self._engine.run_window, plan)
        except PlanError as error:
            if self._dead.is_set():
                raise EngineDead(self._reason) from error
            raise WindowRefused(str(error)) from error
        except Exception as error:
            self._reason = f"the engine failed: {type(error).__name__}: {error}"
            self.kill()
            raise EngineDead(self._reason) from error

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self._reason

    def kill(self) -> None:
        self._engine.close()
        self._dead.set()

    async def close(self, timeout_s: float) -> None:
        self.kill()


class _ProcessDied(Exception):
    """Stands for the end of a process that is not one."""


def _die(status: int) -> NoReturn:
    raise _ProcessDied(f"exit status {status}")
