"""Load tests against a whole server with a scripted engine: every request ends once, and all counts agree."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console

from engine.fake import FakeScript
from loadtest.config import Arrivals, Limits, Shape, Slo, Target
from loadtest.runner import Profile, Settings, execute, passed
from loadtest.scrape import fetch
from loadtest.workload import from_jsonl
from scheduler.config import SchedulerConfig
from tests.conformance.live import live_server
from tests.factories import FAST_SUPERVISION
from tests.fault.test_gateway_process import free_port, server_process, text_until

if TYPE_CHECKING:
    from loadtest.report import Run
    from loadtest.scrape import Sample

SCRIPT = FakeScript(decode_s=0.002, output_ids=(300, 301, 302, 303), max_context=4096)


def settings(url: str, **changes: Any) -> Settings:
    base = Settings(
        target=Target(base_url=f"{url}/v1", model="default", api_key=None, timeout_s=30.0),
        limits=Limits(max_requests=60, duration_s=30.0, warmup_s=0.0),
        arrivals=Arrivals(shape=Shape.CLOSED),
        concurrencies=(6,),
        most_clients=4,
        profile=Profile.CHAT,
        slo=Slo(),
        slo_share=1.0,
        seed=0,
        conversations=(),
        prompt_words=(3, 30),
        output_tokens=(1, 24),
        turns=1,
        oversize_words=6000,
        document_words=400,
        options={},
        sample_metrics=True,
    )
    return dataclasses.replace(base, **changes)


async def load(script: FakeScript = SCRIPT, **changes: Any) -> tuple[Run, Settings]:
    scheduling = SchedulerConfig(supervision=FAST_SUPERVISION, max_queue=12)
    async with live_server(script, scheduler_config=scheduling) as live:
        chosen = settings(live.url, **changes)
        return await execute(chosen, Console(quiet=True)), chosen


def outcomes(run: Run) -> Counter[str]:
    return Counter(record.label for stage in run.stages for record in stage.records)


async def test_faults_end_as_they_should_and_all_counts_agree() -> None:
    run, chosen = await load(profile=Profile.FAULTS)
    assert run.disagreements == ()
    assert passed(run, chosen)
    assert sum(outcomes(run).values()) == 60
    assert {"ok", "disconnected", "http_error 400"} <= outcomes(run).keys()


async def test_a_burst_is_served_or_put_off() -> None:
    run, chosen = await load(profile=Profile.BURST)
    assert run.disagreements == ()
    assert passed(run, chosen)
    # 4 seats, 12 places in the queue; the first may have ended before the last came.
    assert outcomes(run)["ok"] >= 16
    assert outcomes(run)["http_error 429"] == 60 - outcomes(run)["ok"] > 0


async def test_a_soak_agrees_and_its_canary_never_changes() -> None:
    run, chosen = await load(
        profile=Profile.SOAK, limits=Limits(max_requests=150, duration_s=30.0, warmup_s=0.0)
    )
    assert run.disagreements == ()
    assert passed(run, chosen)
    kinds = Counter(record.kind for record in run.stages[0].records)
    assert kinds["canary"] > 1


async def test_a_ramp_to_saturation_ends_by_itself() -> None:
    run, _ = await load(
        arrivals=Arrivals(shape=Shape.SATURATE),
        limits=Limits(max_requests=8, duration_s=30.0, warmup_s=0.0),
        most_clients=4,
    )
    clients = [summary.concurrency for summary in run.summaries]
    assert clients == [1, 2, 4][: len(clients)]
    assert run.seeks_knee
    assert run.disagreements == ()


async def test_a_trace_starts_when_it_says(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    at_s = (0.3, 0.0, 0.15)
    lines = [
        {"timestamp": time_s, "messages": [{"role": "user", "content": f"at {time_s}"}]}
        for time_s in at_s
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    trace = tuple(from_jsonl(path, max_tokens=4))
    run, _ = await load(arrivals=Arrivals(shape=Shape.TRACE), conversations=trace)
    (stage,) = run.stages
    found = sorted(record.intended_start_s - stage.start_s for record in stage.records)
    assert [round(time_s, 6) for time_s in found] == sorted(at_s)
    assert outcomes(run) == {"ok": 3}


async def test_an_engine_killed_under_load_costs_its_requests_one_outcome_each() -> None:
    port = free_port()
    async with server_process(port) as process:
        await text_until(process, "ready in")
        chosen = settings(
            f"http://127.0.0.1:{port}",
            profile=Profile.FAULTS,
            limits=Limits(max_requests=400, duration_s=3.0, warmup_s=0.0),
            server_pid=process.pid,
            # The fifth death within five minutes would be the last, and a slow machine takes longer for the run.
            kill_engine_every_s=2.0,
        )
        run = await execute(chosen, Console(quiet=True))
        async with httpx.AsyncClient() as http:
            ready = await http.get(f"http://127.0.0.1:{port}/ready")
    assert ready.status_code == 200
    assert len(run.kill_times_s) >= 1
    assert run.disagreements == ()
    assert passed(run, chosen)
    assert outcomes(run)["stream_error engine_dead"] + outcomes(run)["http_error 503"] > 0
    assert max(sample.engine_bytes for sample in run.memory) > 0


async def test_a_missed_slo_is_exit_code_1_and_a_report(tmp_path: Path) -> None:
    port = free_port()
    async with server_process(port) as process:
        await text_until(process, "ready in")
        command = [sys.executable, "-m", "loadtest", f"http://127.0.0.1:{port}/v1"]
        command += ["--requests", "6", "--output-tokens", "4:4", "--slo", "ttft=1ms"]
        child = await asyncio.create_subprocess_exec(
            *command, "--out", str(tmp_path), stdout=asyncio.subprocess.DEVNULL
        )
        assert await child.wait() == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["stages"][0]["outcomes"] == {"ok": 6}
    assert report["stages"][0]["good_share"] == 0.0
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 7


async def sample_of(http: httpx.AsyncClient, port: int) -> Sample:
    found = await fetch(http, f"http://127.0.0.1:{port}")
    assert found is not None
    return found


async def test_locust_shows_streams_as_rows(tmp_path: Path) -> None:
    port = free_port()
    async with server_process(port) as process:
        await text_until(process, "ready in")
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
        command += ["--host", f"http://127.0.0.1:{port}", "--max-tokens", "4", "-u", "4", "-r", "9"]
        command += ["-t", "50s", "--csv", str(tmp_path / "r"), "ChatUser", "AgentUser"]
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        async with httpx.AsyncClient() as http:
            while dict((await sample_of(http, port)).requests).get("length", 0.0) < 12:
                assert child.returncode is None
                await asyncio.sleep(0.2)
        child.terminate()
        assert await child.wait() == 0
    with (tmp_path / "r_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    for user in ("chat", "agent"):
        requests = int(rows[user]["Request Count"])
        assert requests > 0
        # Each of the 4 users may be stopped between one row and the next.
        for figure in ("TTFT", "tokens/s"):
            assert requests - 4 <= int(rows[f"{user} {figure}"]["Request Count"]) <= requests + 4
        assert int(rows[f"{user} ITL"]["Request Count"]) > 0
    assert rows["Aggregated"]["Failure Count"] == "0"
