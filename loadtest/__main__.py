"""`python -m loadtest URL --model NAME`: puts load on an OpenAI-compatible server and reports what it saw.

Exit code: 0 when enough requests were good (--slo-share) and, with a fault profile, all ended as they should and
counts agree; 1 when not; 2 for a bad option.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from loadtest import workload
from loadtest.config import Arrivals, Limits, Shape, Slo, Target, parse_duration, parse_slo
from loadtest.driver import http_client
from loadtest.faults import COUNTED
from loadtest.processes import ProcessError, ServerProcesses
from loadtest.reachable import UnreachableError, check
from loadtest.report import Run, print_tables, write_csv, write_html, write_json
from loadtest.runner import Profile, Settings, execute, passed
from loadtest.workload import Conversation, WorkloadError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    base_url: Annotated[str, typer.Argument(help="Server to load, with /v1.")],
    model: Annotated[str, typer.Option(help="Model name sent with each request.")] = "default",
    shape: Annotated[Shape, typer.Option(help="When requests start.")] = Shape.CLOSED,
    concurrency: Annotated[
        str, typer.Option(help="Clients of a closed loop; `1,2,4,8` runs one stage for each.")
    ] = "4",
    max_clients: Annotated[
        int, typer.Option(min=1, help="Most clients of a ramp to saturation.")
    ] = 128,
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
    document_words: Annotated[
        int, typer.Option(min=2, help="Soak profile: words of the longest document.")
    ] = 1500,
    option: Annotated[
        list[str] | None, typer.Option(help="Body field: NAME=JSON, such as temperature=0.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths, order and arrivals.")] = 0,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the API key.")
    ] = "OPENAI_API_KEY",
    metrics: Annotated[bool, typer.Option(help="Sample the server's /metrics.")] = True,
    server_pid: Annotated[
        int | None,
        typer.Option(min=1, help="The server's process here: its memory is watched (Linux)."),
    ] = None,
    kill_engine_every: Annotated[
        str, typer.Option(help="Kill the engine process of --server-pid so often.")
    ] = "",
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
            most_clients=max_clients,
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
            document_words=document_words,
            options=_options(option or [], profile),
            sample_metrics=metrics,
            server_pid=server_pid,
            kill_engine_every_s=_positive("kill-engine-every", parse_duration(kill_engine_every))
            if kill_engine_every
            else None,
        )
        if kill_engine_every and server_pid is None:
            raise ValueError("kill-engine-every needs --server-pid: whose engine?")
        if server_pid is not None:
            ServerProcesses(server_pid)
        timed = [c for c in settings.conversations if c.start_s is not None]
        if shape is Shape.TRACE and len(timed) < max(1, len(settings.conversations)):
            raise ValueError("a trace needs a --workload file whose lines all have a 'timestamp'")
    except (ValueError, OSError, WorkloadError, ProcessError) as error:
        raise typer.BadParameter(str(error)) from error

    console = Console()
    # asyncio's own loop: the clock of uvloop counts whole milliseconds.
    try:
        run = asyncio.run(_run(settings, console))
    except UnreachableError as error:
        raise typer.BadParameter(str(error)) from error
    print_tables(run, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(run, out / "report.json")
        write_csv(run, out / "requests.csv")
        write_html(run, out / "report.html")
        console.print(f"written: {out}/report.json, requests.csv, report.html")
    raise typer.Exit(0 if passed(run, settings) else 1)


async def _run(settings: Settings, console: Console) -> Run:
    async with http_client(settings.target) as http:
        await check(http, settings.target)
    return await execute(settings, console)


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


def _options(texts: list[str], profile: Profile) -> dict[str, object]:
    """Body fields; every profile but chat compares counts, and so wants to know what a stream has cost so far."""
    given = dict(_option(text) for text in texts)
    return given if profile is Profile.CHAT else {**COUNTED, **given}


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
