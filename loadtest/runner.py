"""Runs what the settings say: the stages, beside them a watch on the server, at the end the comparison of counts."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import faults, saturation, scrape, workload
from loadtest.agreement import disagreements
from loadtest.arrivals import start_times
from loadtest.config import Arrivals, Limits, Shape, Slo, Target
from loadtest.driver import Driver, Stage, clients_name, http_client
from loadtest.processes import MemorySample, ProcessError, ServerProcesses
from loadtest.report import Run
from loadtest.soak import soak_mix
from loadtest.stats import Summary, summarize

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from loadtest.client import RequestPlan, RequestRecord
    from loadtest.scrape import Sample
    from loadtest.workload import Conversation

_SETTLE_S = 30.0
"""For running requests to end, a killed engine to come back, and the counters to agree."""
_SAMPLE_EVERY_S = 1.0


class Profile(StrEnum):
    """Who the clients are."""

    CHAT = "chat"
    FAULTS = "faults"
    """Ordinary clients mixed with ones that leave, read slowly, send nonsense or too much."""
    BURST = "burst"
    """All requests at once."""
    SOAK = "soak"
    """People, agents and documents, some who leave, a few faults, and a canary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run, parsed and checked."""

    target: Target
    limits: Limits
    arrivals: Arrivals
    concurrencies: tuple[int, ...]
    most_clients: int
    """Where a ramp to saturation ends at the latest."""
    profile: Profile
    slo: Slo
    slo_share: float
    seed: int
    conversations: tuple[Conversation, ...]
    """Empty: random words."""
    prompt_words: tuple[int, int]
    output_tokens: tuple[int, int]
    turns: int
    oversize_words: int
    document_words: int
    options: dict[str, object]
    sample_metrics: bool
    server_pid: int | None = None
    kill_engine_every_s: float | None = None

    @property
    def is_closed(self) -> bool:
        loops = (Shape.CLOSED, Shape.SATURATE)
        return self.arrivals.shape in loops and self.profile is not Profile.BURST


def passed(run: Run, settings: Settings) -> bool:
    """Whether the run meets what was asked of it."""
    if not any(summary.num_requests for summary in run.summaries):
        return False
    if settings.arrivals.shape is Shape.SATURATE and settings.profile is Profile.CHAT:
        # The last stages are meant to be too much.
        return saturation.capacity(run.summaries, share=settings.slo_share) is not None
    if settings.profile is Profile.CHAT and settings.kill_engine_every_s is None:
        return all(summary.good_share >= settings.slo_share for summary in run.summaries)
    is_odd = any(summary.num_unexpected or summary.num_usage_wrong for summary in run.summaries)
    return not is_odd and not run.disagreements


async def execute(settings: Settings, console: Console) -> Run:
    """Raises ProcessError when the server's processes should be watched and are not there."""
    pid = settings.server_pid
    watch = _Watch(settings, None if pid is None else ServerProcesses(pid))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    async with http_client(settings.target) as http:
        before = (
            await scrape.fetch(http, settings.target.root_url) if settings.sample_metrics else None
        )
        async with watch.running(http, samples_metrics=before is not None):
            stages = await _stages(settings, http, console)
        records = [record for stage in stages for record in stage.records]
        found = None
        if before is not None and before.is_idle:
            found = await watch.settled(http, before, records)
    return Run(
        started_at=started_at,
        settings=_shown(settings),
        slo=settings.slo,
        slo_share=settings.slo_share,
        stages=tuple(stages),
        summaries=tuple(_summary(stage, settings) for stage in stages),
        samples=tuple(watch.samples),
        memory=tuple(watch.memory),
        kill_times_s=tuple(watch.kill_times_s),
        seeks_knee=settings.arrivals.shape is Shape.SATURATE,
        disagreements=found,
    )


@dataclass(slots=True)
class _Watch:
    """What goes on beside the load: samples of the server, and kills of its engine."""

    settings: Settings
    processes: ServerProcesses | None
    samples: list[Sample] = field(default_factory=list["Sample"])
    memory: list[MemorySample] = field(default_factory=list[MemorySample])
    kill_times_s: list[float] = field(default_factory=list[float])

    @contextlib.asynccontextmanager
    async def running(
        self, http: httpx.AsyncClient, *, samples_metrics: bool
    ) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._sample(http, samples_metrics=samples_metrics))]
            every_s = self.settings.kill_engine_every_s
            if self.processes is not None and every_s is not None:
                beside.append(tasks.create_task(self._kill(self.processes, every_s)))
            yield
            for task in beside:
                task.cancel()

    async def settled(
        self, http: httpx.AsyncClient, before: Sample, records: list[RequestRecord]
    ) -> tuple[str, ...] | None:
        """Disagreements once the server is idle, or when it still is not after a while; None without a sample."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _SETTLE_S
        while True:
            after = await scrape.fetch(http, self.settings.target.root_url)
            found = None
            if after is not None:
                kills = len(self.kill_times_s)
                found = tuple(disagreements(before, after, records, num_kills=kills))
                if after.is_idle and not found or loop.time() >= deadline_s:
                    self.samples = [before, *self.samples, after]
                    return found
            elif loop.time() >= deadline_s:
                return None
            await asyncio.sleep(0.5)

    async def _sample(self, http: httpx.AsyncClient, *, samples_metrics: bool) -> None:
        """A server without metrics is not asked again; a process that ended is seen no more."""
        while samples_metrics or self.processes is not None:
            if samples_metrics:
                sample = await scrape.fetch(http, self.settings.target.root_url)
                self.samples += [] if sample is None else [sample]
            if self.processes is not None:
                with contextlib.suppress(ProcessError):  # between two engines there is none to read
                    now_s = asyncio.get_running_loop().time()
                    self.memory.append(self.processes.memory(time_s=now_s))
            await asyncio.sleep(_SAMPLE_EVERY_S)

    async def _kill(self, processes: ServerProcesses, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if processes.kill_engine():
                self.kill_times_s.append(asyncio.get_running_loop().time())


async def _stages(settings: Settings, http: httpx.AsyncClient, console: Console) -> list[Stage]:
    stages: list[Stage] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        for clients in _clients(settings, stages):
            name = str(settings.arrivals.shape) if clients is None else clients_name(clients)
            bar = progress.add_task(name, total=settings.limits.max_requests)

            def advance(record: RequestRecord, bar: Any = bar) -> None:
                progress.advance(bar)

            driver = Driver(
                http=http,
                target=settings.target,
                limits=settings.limits,
                source=_source(settings),
                options=settings.options,
                also_expected=faults.ENGINE_LOST if settings.kill_engine_every_s else (),
                on_record=advance,
            )
            if clients is None:
                stages.append(await driver.open_loop(*_open_loop(settings)))
            else:
                stages.append(await driver.closed_loop(clients))
    return stages


def _clients(settings: Settings, done: list[Stage]) -> Iterator[int | None]:
    """Clients of each stage, None for the one stage of an open loop; a ramp looks at the stages that are done."""
    if not settings.is_closed:
        yield None
    elif settings.arrivals.shape is Shape.CLOSED:
        yield from settings.concurrencies
    else:
        while True:
            summaries = [_summary(stage, settings) for stage in done]
            clients = saturation.next_clients(summaries, most=settings.most_clients)
            if clients is None:
                return
            yield clients


def _summary(stage: Stage, settings: Settings) -> Summary:
    return summarize(stage, warmup_s=settings.limits.warmup_s, slo=settings.slo)


def _open_loop(settings: Settings) -> tuple[str, Iterator[float]]:
    size = settings.limits.max_requests
    if settings.profile is Profile.BURST:
        return f"burst of {size}", iter([0.0] * size)
    times = start_times(
        settings.arrivals,
        duration_s=settings.limits.duration_s,
        trace_s=[c.start_s for c in settings.conversations if c.start_s is not None],
        rng=random.Random(f"{settings.seed} arrivals"),
    )
    return f"{settings.arrivals.shape} arrivals", times


def _source(settings: Settings) -> Iterator[Conversation | RequestPlan]:
    """The same for every stage: the seed decides."""
    rng = random.Random(f"{settings.seed} workload")
    model, max_tokens = settings.target.model, settings.output_tokens[1]
    oversize_words = settings.oversize_words
    match settings.profile:
        case Profile.BURST:
            size = settings.limits.max_requests
            return faults.burst(rng, model=model, max_tokens=max_tokens, size=size)
        case Profile.FAULTS:
            return faults.fault_mix(
                rng, model=model, max_tokens=max_tokens, oversize_words=oversize_words
            )
        case Profile.SOAK:
            return soak_mix(
                rng,
                model=model,
                max_tokens=max_tokens,
                document_words=settings.document_words,
                oversize_words=oversize_words,
            )
        case Profile.CHAT:
            return _conversations(settings, rng)


def _conversations(settings: Settings, rng: random.Random) -> Iterator[Conversation | RequestPlan]:
    if settings.arrivals.shape is Shape.TRACE:
        yield from sorted(settings.conversations, key=lambda c: c.start_s or 0.0)
    elif settings.conversations:
        yield from workload.cycle(list(settings.conversations), rng)
    else:
        while True:
            yield workload.random_conversation(
                rng,
                prompt_words=settings.prompt_words,
                output_tokens=settings.output_tokens,
                turns=settings.turns,
            )


def _shown(settings: Settings) -> dict[str, Any]:
    """What a report says of the settings; never the key."""
    arrivals, limits = settings.arrivals, settings.limits
    closed = arrivals.shape is Shape.CLOSED
    shown: dict[str, Any] = {
        "server": settings.target.base_url,
        "model": settings.target.model,
        "profile": str(settings.profile),
        "shape": str(arrivals.shape),
        "clients": ", ".join(map(str, settings.concurrencies)) if closed else "",
        "rate": "" if settings.is_closed else arrivals.rate,
        "limits": f"{limits.max_requests} requests or {limits.duration_s:g} s a stage, "
        f"first {limits.warmup_s:g} s not counted",
        "workload": f"{len(settings.conversations)} conversations"
        if settings.conversations
        else f"random, {settings.prompt_words[0]} to {settings.prompt_words[1]} words",
        "output tokens": f"{settings.output_tokens[0]} to {settings.output_tokens[1]}",
        "body fields": orjson.dumps(settings.options).decode(),
        "slo": settings.slo.describe(),
        "engine killed": f"every {settings.kill_engine_every_s:g} s"
        if settings.kill_engine_every_s
        else "",
        "seed": settings.seed,
    }
    if settings.profile is not Profile.CHAT:
        del shown["workload"]
    return {name: value for name, value in shown.items() if value != ""}
