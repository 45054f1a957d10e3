"""`python -m loadtest.bench cpu`: the figures of docs/benchmarks.md, measured over HTTP on servers it starts itself.

Each round starts the server without and with drafts, llama.cpp's server if one is given, and Hugging Face transformers
on the same weights, one after the other; a figure is the median of its rounds, so that a change of the machine's mood
meets all of them. Use an idle machine: the load before the start is part of the result.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any, cast

import orjson
import typer
from rich.console import Console

from loadtest import scrape
from loadtest.bench_report import LLAMA_OFF, LLAMA_ON, OFF, ON, markdown
from loadtest.client import Outcome, RequestPlan, RequestRecord
from loadtest.config import Limits, Slo, Target
from loadtest.driver import Driver, Stage, chat_body, http_client
from loadtest.llama_server import DRAFTS, LlamaServer
from loadtest.server_process import ServerProcess, free_port, running
from loadtest.stats import summarize
from loadtest.workload import random_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MEMORY_EVERY_S = 0.25
_STREAMS = 4
_SETTLE_S = 0.5

# The model's own sampling, seeded: drafts may not change a token of it, so both servers write the same.
_SAMPLING: dict[str, object] = {}
_GREEDY: dict[str, object] = {"temperature": 0}

_QUESTIONS = (
    "What is a tide and why does it come twice a day?",
    "Give me three tips for learning a new language.",
    "How do I make a simple tomato soup?",
    "Explain what a budget is to a ten year old.",
    "Write a short note to thank a colleague for her help.",
    "What should I pack for a weekend in the mountains?",
    "Why is regular sleep important for students?",
    "Describe the life of a bee in a few sentences.",
    "What are the pros and cons of working from home?",
    "How can a small shop find more customers?",
    "Tell me a short story about a lost umbrella.",
    "What is the difference between weather and climate?",
)


@dataclass(slots=True, kw_only=True)
class Round:
    """Figures of one server in one round. Rates are in tokens a second."""

    start_up_s: float = 0.0
    peak_mib: float = 0.0
    one_stream_tokens_per_s: float = 0.0
    """From first to last chunk, prompt reading left out, as the HF figure is taken."""
    one_stream_greedy_tokens_per_s: float = 0.0
    greedy_answers: list[str] = field(default_factory=list[str])
    four_streams_tokens_per_s: float = 0.0
    """All streams together from first request to last answer, prompt reading included."""
    one_client_tokens_per_s: float = 0.0
    """The same measure with one client."""
    prefill_tokens_per_s: float = 0.0
    ttft_ms: float = 0.0
    """One stream, short prompt, median."""
    acceptance: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    """Depth -> (verified, accepted), of the sampled chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What to start: a command that takes `--port N`, and the path that answers 200 when it is ready."""

    command: tuple[str, ...]
    ready_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    model: Path
    rounds: int
    requests: int
    max_tokens: int
    prompt_words: int
    threads: int | None
    server_options: tuple[str, ...]


@app.callback()
def root() -> None:
    """Benchmarks that start their own servers."""


@app.command()
def cpu(
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint directory; left out: the default model of this source tree."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are taken over these.")] = 3,
    requests: Annotated[int, typer.Option(min=4, help="Chats per client.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=8)] = 96,
    prompt_words: Annotated[int, typer.Option(min=100, help="Of the long prompts.")] = 1200,
    threads: Annotated[int | None, typer.Option(min=1, help="Of servers and baseline.")] = None,
    server_option: Annotated[
        list[str] | None, typer.Option(help="Passed on to our server, such as --dtype=float32.")
    ] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="Executable of llama.cpp's server, to measure it as well.")
    ] = None,
    llama_model: Annotated[
        Path | None,
        typer.Option(help="The same model for it: `stratagate convert MODEL FILE --q8`."),
    ] = None,
    llama_drafts: Annotated[
        bool, typer.Option(help="Also with its drafts, which not every release survives.")
    ] = True,
    baseline: Annotated[bool, typer.Option(help="Also measure transformers.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file for everything measured.")] = None,
) -> None:
    """Tokens per second, acceptance, start-up and memory of the default model on this machine's CPU."""
    plan = Plan(
        model=model or Path(__file__).resolve().parents[1] / "engine" / "default_model",
        rounds=rounds,
        requests=requests,
        max_tokens=max_tokens,
        prompt_words=prompt_words,
        threads=threads,
        server_options=tuple(server_option or ()),
    )
    if (llama_server is None) != (llama_model is None):
        raise typer.BadParameter("--llama-server and --llama-model: found one, required both")
    servers = {OFF: _ours(plan, "--no-mtp"), ON: _ours(plan)}
    if llama_server is not None and llama_model is not None:
        rival = LlamaServer(executable=llama_server, file=llama_model)
        command = rival.command(plan.model, threads)
        servers[LLAMA_OFF] = Server(command=command, ready_path="/health")
        if llama_drafts:
            servers[LLAMA_ON] = Server(command=(*command, *DRAFTS), ready_path="/health")
    console = Console(stderr=True)
    load_before = os.getloadavg()[0]
    measured: dict[str, list[Round]] = {name: [] for name in servers}
    hf: list[dict[str, Any]] = []
    for number in range(rounds):
        for name, server in servers.items():
            console.print(f"round {number + 1} of {rounds}: {name}")
            measured[name].append(_measure_server(plan, number, server))
        if baseline:
            console.print(f"round {number + 1} of {rounds}: transformers")
            hf += [_measure_hf(plan, dtype) for dtype in _baseline_dtypes()]
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_before": load_before,
        "command": "python -m loadtest.bench " + " ".join(sys.argv[1:]),
        "servers": {name: [asdict(item) for item in items] for name, items in measured.items()},
        "transformers": hf,
    }
    if out is not None:
        out.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    Console(soft_wrap=True, highlight=False, markup=False).print(markdown(result))


def machine() -> str:
    """Processor and number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {platform.system()}"


def _ours(plan: Plan, *options: str) -> Server:
    command = [sys.executable, "-m", "gateway", "serve", "--model", str(plan.model)]
    command += (*options, *plan.server_options)
    if plan.threads is not None:
        command += ["--threads", str(plan.threads)]
    return Server(command=tuple(command), ready_path="/ready")


def _measure_server(plan: Plan, number: int, server: Server) -> Round:
    """Start a server, run all stages against it, stop it."""
    port = free_port()
    command = [*server.command, "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running(command, port=port, ready_path=server.ready_path, log=log) as process:
            return asyncio.run(_stages(plan, number, process))


async def _stages(plan: Plan, number: int, server: ServerProcess) -> Round:
    found = Round(start_up_s=server.start_up_s)
    target = Target(base_url=f"{server.root_url}/v1", model="default", api_key=None, timeout_s=600)
    models_url = f"{target.base_url}/models"
    async with http_client(target) as http:
        target = Target(
            base_url=target.base_url,
            model=(await http.get(models_url)).json()["data"][0]["id"],
            api_key=None,
            timeout_s=target.timeout_s,
        )
        watcher = asyncio.create_task(_watch_memory(server))
        await _stage(target, 1, _chats(plan, target, 2, -1, _SAMPLING))  # warm-up

        before = await scrape.fetch(http, target.root_url)
        one = await _stage(target, 1, _chats(plan, target, plan.requests, number, _SAMPLING))
        after = await scrape.fetch(http, target.root_url)
        if before is not None and after is not None:
            rows = scrape.acceptance(before, after)
            found.acceptance = {depth: (offered, kept) for depth, offered, kept in rows if offered}
        found.one_stream_tokens_per_s = decode_rate(one.records)
        found.one_client_tokens_per_s = _total_rate(one)
        found.ttft_ms = 1000 * statistics.median(r.ttft_s or 0.0 for r in one.records)

        greedy = await _stage(target, 1, _chats(plan, target, plan.requests, 0, _GREEDY))
        found.one_stream_greedy_tokens_per_s = decode_rate(greedy.records)
        found.greedy_answers = [record.text for record in greedy.records]

        chats = _chats(plan, target, plan.requests * _STREAMS, number, _SAMPLING)
        found.four_streams_tokens_per_s = _total_rate(await _stage(target, _STREAMS, chats))

        long = await _stage(target, 1, _long_prompts(plan, target, number))
        found.prefill_tokens_per_s = statistics.median(
            (r.prompt_tokens or 0) / r.ttft_s for r in long.records if r.ttft_s
        )
        watcher.cancel()
    found.peak_mib = server.peak_bytes / (1 << 20)
    return found


async def _watch_memory(server: ServerProcess) -> None:
    while True:
        await asyncio.to_thread(server.sample_memory)
        await asyncio.sleep(_MEMORY_EVERY_S)


async def _stage(target: Target, clients: int, plans: list[RequestPlan]) -> Stage:
    await asyncio.sleep(_SETTLE_S)
    source: Iterator[Any] = iter(plans)
    limits = Limits(max_requests=len(plans), duration_s=3600, warmup_s=0)
    async with http_client(target) as http:
        # llama.cpp's server may close a kept connection just as it is used again; the same for every server.
        http.headers["connection"] = "close"
        driver = Driver(http=http, target=target, limits=limits, source=source)
        stage = await driver.closed_loop(clients)
    for record in stage.records:
        if record.outcome is not Outcome.OK:
            raise SystemExit(f"a request failed: {record.label} {record.error}")
    return stage


def _chats(
    plan: Plan, target: Target, count: int, number: int, sampling: dict[str, object]
) -> list[RequestPlan]:
    """The same questions and seeds for every server of a round."""
    return [
        RequestPlan(
            body=chat_body(
                target.model,
                [{"role": "user", "content": question}],
                plan.max_tokens,
                {**sampling, "seed": 1000 * (number + 1) + index},
            )
        )
        for index, question in enumerate(itertools.islice(itertools.cycle(_QUESTIONS), count))
    ]


def _long_prompts(plan: Plan, target: Target, number: int) -> list[RequestPlan]:
    """Prompts that share no beginning, for one token each."""
    rng = Random(number)
    return [
        RequestPlan(
            body=chat_body(
                target.model,
                [{"role": "user", "content": random_text(rng, plan.prompt_words)}],
                1,
                {"ignore_eos": True, **_GREEDY},
            )
        )
        for _ in range(4)
    ]


def decode_rate(records: list[RequestRecord]) -> float:
    """Tokens after each answer's first chunk, per second from first to last chunk."""
    tokens = seconds = 0.0
    for record in records:
        num_chunks = len(record.chunk_times_s)
        if record.completion_tokens is None or num_chunks < 2:
            continue
        # The first chunk holds one token: the pick at the end of the prompt.
        tokens += record.completion_tokens - 1
        seconds += record.chunk_times_s[-1] - record.chunk_times_s[0]
    return tokens / seconds if seconds else 0.0


def _total_rate(stage: Stage) -> float:
    return summarize(stage, warmup_s=0.0, slo=Slo()).tokens_per_s


def _baseline_dtypes() -> tuple[str, ...]:
    """float32, and bfloat16 where the processor multiplies it: elsewhere it is emulated, many times slower."""
    cpuinfo = Path("/proc/cpuinfo")
    has_bfloat16 = not cpuinfo.exists() or "_bf16" in cpuinfo.read_text()
    return ("float32", "bfloat16") if has_bfloat16 else ("float32",)


def _measure_hf(plan: Plan, dtype: str) -> dict[str, Any]:
    script = Path(__file__).with_name("hf_baseline.py")
    command = [sys.executable, str(script), str(plan.model), "--dtype", dtype, "--runs", "1"]
    command += ["--text", _QUESTIONS[0]]
    if plan.threads is not None:
        command += ["--threads", str(plan.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the baseline failed:\n{done.stderr[-2000:]}")
    return cast("dict[str, Any]", json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    app()
