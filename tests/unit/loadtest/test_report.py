"""The files a run leaves: complete, parseable, self-contained."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from rich.console import Console

from loadtest.client import Outcome
from loadtest.config import Arrivals, Shape, Slo
from loadtest.driver import Driver, Stage
from loadtest.plot import Series, line_chart
from loadtest.processes import MemorySample
from loadtest.report import Run, print_tables, write_csv, write_html, write_json
from loadtest.runner import Profile, Settings, passed
from loadtest.stats import summarize
from loadtest.workload import Conversation
from tests.unit.loadtest.records import record, sample
from tests.unit.loadtest.virtual import TARGET, ScriptedServer, client, limits, run, steady

SLO = Slo(limits=(("ttft", 0.25),))


def make_run() -> Run:
    async def main() -> list[Stage]:
        server = ScriptedServer(lambda _: steady(ttft_s=0.2, itl_s=0.1, num_chunks=4))
        async with client(server) as http:
            stages: list[Stage] = []
            for concurrency in (1, 2):
                driver = Driver(
                    http=http,
                    target=TARGET,
                    limits=limits(max_requests=4),
                    source=itertools.repeat(Conversation(turns=("<b>hello</b>",))),
                )
                stages.append(await driver.closed_loop(concurrency))
            return stages

    stages = run(main())
    offered = [(("1", 10.0 * n),) for n in range(3)]
    return Run(
        started_at="2030-01-01T00:00:00+00:00",
        settings={"server": "http://server/v1", "body fields": '{"a": "</td><script>"}'},
        slo=SLO,
        slo_share=0.99,
        stages=tuple(stages),
        summaries=tuple(summarize(stage, warmup_s=0.0, slo=SLO) for stage in stages),
        samples=tuple(
            sample(time_s=float(n), drafts_offered=offered[n], drafts_accepted=(("1", 6.0 * n),))
            for n in range(3)
        ),
        memory=(),
        kill_times_s=(),
        seeks_knee=False,
        disagreements=(),
    )


def test_json_holds_figures_and_every_request(tmp_path: Path) -> None:
    write_json(make_run(), tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert [stage["concurrency"] for stage in report["stages"]] == [1, 2]
    assert abs(report["stages"][0]["distributions"]["ttft"]["p99_s"] - 0.2) < 1e-9
    assert len(report["requests"]) == 8
    assert {request["outcome"] for request in report["requests"]} == {"ok"}


def test_csv_has_a_row_per_request(tmp_path: Path) -> None:
    write_csv(make_run(), tmp_path / "r.csv")
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert {row["completion_tokens"] for row in rows} == {"4"}


def test_html_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path) -> None:
    write_html(make_run(), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert page.count("<svg") == 7


def test_tables_name_slo_acceptance_and_agreement() -> None:
    console = Console(record=True, width=120, quiet=False, file=None)
    with console.capture() as capture:
        print_tables(make_run(), console)
    text = capture.get()
    assert "100.0% met ttft <= 250 ms" in text
    assert "drafts accepted by depth: 1: 0.60" in text
    assert "agree on all counts" in text


def test_a_run_says_what_it_saw_beside_the_load(tmp_path: Path) -> None:
    plain = make_run()
    run_ = dataclasses.replace(
        plain,
        memory=tuple(
            MemorySample(time_s=float(n), server_bytes=n << 20, engine_bytes=(9 - n) << 20)
            for n in range(4)
        ),
        samples=(sample(parked_bytes=3.0 * (1 << 20)),),
        kill_times_s=(1.0, 2.0),
        seeks_knee=True,
    )
    write_json(run_, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["notes"] == [
        "not saturated by 2 clients: 16.0 tokens/s, TTFT 200 ms (p50)",
        "2 clients meet ttft <= 250 ms for 99% of the requests",
        "engine killed 2 times",
        "memory of the server, MiB: 0.0 at first, 3.0 at most, 2.0 halfway, 3.0 at last",
        "memory of the engine, MiB: 9.0 at first, 9.0 at most, 7.0 halfway, 6.0 at last",
        "of the engine's, 3.0 MiB parked at most",
        "server and clients agree on all counts",
    ]
    write_html(run_, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "engine killed 2 times" in page
    assert page.count("<svg") == 6


def test_kinds_of_requests_are_told_apart() -> None:
    plain = make_run()
    stage = dataclasses.replace(
        plain.stages[0],
        records=[
            record(),
            record(kind="canary"),
            record(Outcome.STREAM_ERROR, kind="canary", error_code="engine_dead"),
        ],
    )
    console = Console(width=200)
    with console.capture() as capture:
        print_tables(dataclasses.replace(plain, stages=(stage,)), console)
    assert "canary: ok 1, stream_error engine_dead 1; chat: ok 1" in capture.get()


def test_charts_are_well_formed_also_without_points() -> None:
    for points in ([], [(0.0, 0.0)], [(1.0, 2.0), (3.0, 1e6)]):
        ET.fromstring(line_chart("a & b", "s", "<", [Series("x<y", points)]))


def make_settings(profile: Profile, slo_share: float) -> Settings:
    return Settings(
        target=TARGET,
        limits=limits(),
        arrivals=Arrivals(shape=Shape.CLOSED),
        concurrencies=(1,),
        most_clients=1,
        profile=profile,
        slo=SLO,
        slo_share=slo_share,
        seed=0,
        conversations=(),
        prompt_words=(1, 1),
        output_tokens=(1, 1),
        turns=1,
        oversize_words=1,
        document_words=2,
        options={},
        sample_metrics=True,
    )


def test_a_chat_run_passes_by_its_share_of_good_requests() -> None:
    run_ = make_run()
    strict = dataclasses.replace(
        run_,
        summaries=tuple(
            summarize(stage, warmup_s=0.0, slo=Slo(limits=(("ttft", 0.1),)))
            for stage in run_.stages
        ),
    )
    assert passed(run_, make_settings(Profile.CHAT, 0.99))
    assert not passed(strict, make_settings(Profile.CHAT, 0.99))
    assert passed(strict, make_settings(Profile.CHAT, 0.0))
    assert not passed(dataclasses.replace(run_, summaries=()), make_settings(Profile.CHAT, 0.0))


def test_a_ramp_passes_when_some_clients_were_served_well() -> None:
    run_ = make_run()
    settings = dataclasses.replace(
        make_settings(Profile.CHAT, 0.99), arrivals=Arrivals(shape=Shape.SATURATE)
    )
    bad = dataclasses.replace(run_.summaries[1], num_good=0)
    assert passed(dataclasses.replace(run_, summaries=(run_.summaries[0], bad)), settings)
    assert not passed(dataclasses.replace(run_, summaries=(bad, bad)), settings)


def test_a_fault_run_passes_when_all_ended_as_they_should_and_counts_agree() -> None:
    run_ = make_run()
    settings = make_settings(Profile.FAULTS, 0.99)
    assert passed(run_, settings)
    assert not passed(dataclasses.replace(run_, disagreements=("x",)), settings)
    for field in ("num_unexpected", "num_usage_wrong"):
        odd = dataclasses.replace(run_.summaries[0], **{field: 1})
        assert not passed(dataclasses.replace(run_, summaries=(odd,)), settings)
