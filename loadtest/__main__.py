"""`python -m loadtest URL --model NAME`: puts load on an OpenAI-compatible server and reports what it saw.

Exit code: 0 when enough requests were good (--slo-share) and, with a fault profile, all ended as they should and
counts agree; 1 when not; 2 for a bad option.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import faults, scrape, workload
from loadtest.arrivals import start_times
from loadtest.config import Arrivals, Limits, Shape, Slo, Target, parse_duration, parse_slo
from loadtest.driver import Driver, Stage, http_client
from loadtest.report import Run, print_tables, write_csv, write_html, write_json
from loadtest.stats import summarize
from loadtest.workload import Conversation, WorkloadError

if TYPE_CHECKING:
    import httpx

    from loadtest.client import RequestPlan, RequestRecord
    from loadtest.scrape import Sample

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_IDLE_WAIT_S = 10.0


class Profile(StrEnum):
    """Who the clients are."""

    CHAT = "chat"
    FAULTS = "faults"
    """Ordinary clients mixed with ones that leave, read slowly, send nonsense or too much."""
    BURST = "burst"
    """All requests at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run, parsed and checked."""

    target: Target
    limits: Limits
    arrivals: Arrivals
    concurrencies: tuple[int, ...]
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
    options: dict[str, object]
    sample_metrics: bool


@app.command()
def main(
    base_url: Annotated[str, typer.Argument(help="Server to load, with /v1.")],
    model: Annotated[str, typer.Option(help="Model name sent with each request.")] = "default",
    shape: Annotated[Shape, typer.Option(help="When requests start.")] = Shape.CLOSED,
    concurrency: Annotated[
        str, typer.Option(help="Clients of a closed loop; `1,2,4,8` runs one stage for each.")
    ] = "4",
    rate: Annotated[float, typer.Option(help="Conversations per second of an open loop.")] = 1.0,
    rate_end: Annotated[float, typer.Option(help="Rate at the end of a ramp.")] = 10.0,
    burstiness: Annotated[
        float, typer.Option(help="Gamma shape: below 1 in bursts, above 1 more even.")
    ] = 1.0,
    profile: Annotated[Profile, typer.Option(help="Who the clients are.")] = Profile.CHAT,
    source: Annotated[
        str,
        typer.Option("--workload", help="`random`, `sharegpt`, or a JSONL file of conversations."),
    ] = "random",
    prompt_words: Annotated[str, typer.Option(help="Random workload: MIN:MAX.")] = "20:200",
    output_tokens: Annotated[str, typer.Option(help="max_tokens of a request: MIN:MAX.")] = "64:64",
    turns: Annotated[int, typer.Option(min=1, help="Random workload: turns each.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="At most this many a stage.")] = 100,
    duration: Annotated[str, typer.Option(help="At most this long a stage.")] = "60s",
    warmup: Annotated[str, typer.Option(help="Start of each stage that is not counted.")] = "0s",
    timeout: Annotated[str, typer.Option(help="For one request.")] = "300s",
    slo: Annotated[str, typer.Option(help="`ttft=500ms,itl=50ms`; also tpot and e2e.")] = "",
    slo_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that must be good for exit 0.")
    ] = 0.99,
    oversize_words: Annotated[
        int, typer.Option(min=1, help="Fault profile: words of a prompt that cannot fit.")
    ] = 300_000,
    option: Annotated[
        list[str] | None, typer.Option(help="Body field: NAME=JSON, such as temperature=0.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths, order and arrivals.")] = 0,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the API key.")
    ] = "OPENAI_API_KEY",
    metrics: Annotated[bool, typer.Option(help="Sample the server's /metrics.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json, requests.csv, report.html.")
    ] = None,
) -> None:
    """Put load on an OpenAI-compatible server and report what it did."""
    try:
        settings = Settings(
            target=Target(
                base_url=_url(base_url),
                model=model,
                api_key=os.environ.get(api_key_env),
                timeout_s=parse_duration(timeout),
            ),
            limits=Limits(
                max_requests=requests,
                duration_s=_positive("duration", parse_duration(duration)),
                warmup_s=parse_duration(warmup),
            ),
            arrivals=Arrivals(
                shape=shape,
                rate=_positive("rate", rate),
                rate_end=_positive("rate-end", rate_end),
                burstiness=_positive("burstiness", burstiness),
            ),
            concurrencies=tuple(_count("concurrency", part) for part in concurrency.split(",")),
            profile=profile,
            slo=parse_slo(slo) if slo else Slo(),
            slo_share=slo_share,
            seed=seed,
            conversations=_conversations(source, _range("output-tokens", output_tokens)),
            prompt_words=_range("prompt-words", prompt_words),
            output_tokens=_range("output-tokens", output_tokens),
            turns=turns,
            oversize_words=oversize_words,
            options=dict(_option(text) for text in option or []),
            sample_metrics=metrics,
        )
        timed = [c for c in settings.conversations if c.start_s is not None]
        if shape is Shape.TRACE and len(timed) < max(1, len(settings.conversations)):
            raise ValueError("a trace needs a --workload file whose lines all have a 'timestamp'")
    except (ValueError, OSError, WorkloadError) as error:
        raise typer.BadParameter(str(error)) from error

    console = Console()
    run = asyncio.run(_run(settings, console))
    print_tables(run, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(run, out / "report.json")
        write_csv(run, out / "requests.csv")
        write_html(run, out / "report.html")
        console.print(f"written: {out}/report.json, requests.csv, report.html")
    raise typer.Exit(0 if passed(run, settings) else 1)


def passed(run: Run, settings: Settings) -> bool:
    """Whether the run meets what was asked of it."""
    if not any(summary.num_requests for summary in run.summaries):
        return False
    if settings.profile is Profile.CHAT:
        return all(summary.good_share >= settings.slo_share for summary in run.summaries)
    as_expected = not any(summary.num_unexpected for summary in run.summaries)
    return as_expected and not run.disagreements


async def _run(settings: Settings, console: Console) -> Run:
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    samples: list[Sample] = []
    root_url = settings.target.root_url
    async with http_client(settings.target) as http:
        before = await scrape.fetch(http, root_url) if settings.sample_metrics else None
        async with _sampling(http, root_url, samples, enabled=before is not None):
            stages = await _stages(settings, http, console)
        after = await _idle_sample(http, root_url) if before is not None else None
    disagreements = None
    if before is not None and after is not None and before.slots_busy == 0:
        records = [record for stage in stages for record in stage.records]
        disagreements = tuple(faults.disagreements(before, after, records))
        samples = [before, *samples, after]
    warmup_s = settings.limits.warmup_s
    return Run(
        started_at=started_at,
        settings=_shown(settings),
        slo=settings.slo,
        stages=tuple(stages),
        summaries=tuple(summarize(stage, warmup_s=warmup_s, slo=settings.slo) for stage in stages),
        samples=tuple(samples),
        disagreements=disagreements,
    )


async def _idle_sample(http: httpx.AsyncClient, root_url: str) -> Sample | None:
    """The first sample without work in progress; the last one taken if that does not come."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _IDLE_WAIT_S
    while True:
        sample = await scrape.fetch(http, root_url)
        busy = sample is not None and (sample.slots_busy or sample.queue_length)
        if not busy or loop.time() >= deadline_s:
            return sample
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def _sampling(
    http: httpx.AsyncClient, root_url: str, samples: list[Sample], *, enabled: bool
) -> AsyncGenerator[None]:
    async with asyncio.TaskGroup() as tasks:
        sampler = tasks.create_task(_sample(http, root_url, samples, enabled=enabled))
        yield
        sampler.cancel()


async def _sample(
    http: httpx.AsyncClient, root_url: str, samples: list[Sample], *, enabled: bool
) -> None:
    if enabled:
        await scrape.sample_until_cancelled(http, root_url, samples)


async def _stages(settings: Settings, http: httpx.AsyncClient, console: Console) -> list[Stage]:
    closed = settings.arrivals.shape is Shape.CLOSED and settings.profile is not Profile.BURST
    concurrencies = settings.concurrencies if closed else (0,)
    stages: list[Stage] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        for concurrency in concurrencies:
            name = f"{concurrency} clients" if closed else str(settings.arrivals.shape)
            bar = progress.add_task(name, total=settings.limits.max_requests)

            def advance(record: RequestRecord, bar: Any = bar) -> None:
                progress.advance(bar)

            driver = Driver(
                http=http,
                target=settings.target,
                limits=settings.limits,
                source=_source(settings),
                options=settings.options,
                on_record=advance,
            )
            if closed:
                stages.append(await driver.closed_loop(concurrency))
            else:
                stages.append(await driver.open_loop(*_open_loop(settings)))
    return stages


def _open_loop(settings: Settings) -> tuple[str, Iterator[float]]:
    if settings.profile is Profile.BURST:
        return f"burst of {settings.limits.max_requests}", iter(
            [0.0] * settings.limits.max_requests
        )
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
    if settings.profile is Profile.BURST:
        return faults.burst(
            rng, model=model, max_tokens=max_tokens, size=settings.limits.max_requests
        )
    if settings.profile is Profile.FAULTS:
        return faults.fault_mix(
            rng, model=model, max_tokens=max_tokens, oversize_words=settings.oversize_words
        )
    if settings.arrivals.shape is Shape.TRACE:
        timed = [c for c in settings.conversations if c.start_s is not None]
        return iter(sorted(timed, key=lambda c: c.start_s or 0.0))
    if settings.conversations:
        return workload.cycle(list(settings.conversations), rng)
    return _random_conversations(settings, rng)


def _random_conversations(
    settings: Settings, rng: random.Random
) -> Iterator[Conversation | RequestPlan]:
    while True:
        yield workload.random_conversation(
            rng,
            prompt_words=settings.prompt_words,
            output_tokens=settings.output_tokens,
            turns=settings.turns,
        )


def _conversations(source: str, output_tokens: tuple[int, int]) -> tuple[Conversation, ...]:
    if source == "random":
        return ()
    if source == "sharegpt":
        return tuple(
            workload.from_sharegpt(
                max_conversations=2000, max_chars=2000, max_tokens=output_tokens[1]
            )
        )
    return tuple(workload.from_jsonl(Path(source), max_tokens=output_tokens[1]))


def _shown(settings: Settings) -> dict[str, Any]:
    """What a report says of the settings; never the key."""
    arrivals, limits = settings.arrivals, settings.limits
    return {
        "server": settings.target.base_url,
        "model": settings.target.model,
        "profile": str(settings.profile),
        "shape": str(arrivals.shape),
        "clients": ", ".join(map(str, settings.concurrencies))
        if arrivals.shape is Shape.CLOSED
        else "",
        "rate": arrivals.rate if arrivals.shape is not Shape.CLOSED else "",
        "limits": f"{limits.max_requests} requests or {limits.duration_s:g} s a stage, "
        f"first {limits.warmup_s:g} s not counted",
        "workload": f"{len(settings.conversations)} conversations"
        if settings.conversations
        else f"random, {settings.prompt_words[0]} to {settings.prompt_words[1]} words",
        "output tokens": f"{settings.output_tokens[0]} to {settings.output_tokens[1]}",
        "body fields": orjson.dumps(settings.options).decode(),
        "slo": settings.slo.describe(),
        "seed": settings.seed,
    }


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is no http:// or https:// address")
    return text


def _count(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{name} {text!r}: expected a whole number from 1")
    return int(text)


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} {value}: must be above 0")
    return value


def _range(name: str, text: str) -> tuple[int, int]:
    low, separator, high = text.partition(":")
    first, last = _count(name, low), _count(name, high if separator else low)
    if first > last:
        raise ValueError(f"{name} {text!r}: expected MIN:MAX")
    return first, last


def _option(text: str) -> tuple[str, object]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"option {text!r}: expected NAME=JSON")
    try:
        return name, orjson.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    app()
