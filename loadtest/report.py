"""One table, one JSON file, one CSV file and one self-contained HTML page from the figures of a run."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.table import Table

from loadtest.client import Outcome, RequestRecord
from loadtest.plot import Series, line_chart
from loadtest.saturation import capacity, is_saturated, knee
from loadtest.scrape import Sample, acceptance, acceptance_rate
from loadtest.stats import PERCENTILES, Summary, tokens_over_time

if TYPE_CHECKING:
    from rich.console import Console

    from loadtest.config import Slo
    from loadtest.driver import Stage
    from loadtest.processes import MemorySample

_METRICS = (
    ("ttft", "TTFT"),
    ("itl", "ITL, per chunk"),
    ("tpot", "TPOT"),
    ("e2e", "whole request"),
    ("late", "client late"),
)
_SCHEMA = 1
# In the terminal, so that a table fits 80 columns; the files have all of PERCENTILES.
_SHOWN = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything a report shows."""

    started_at: str
    """ISO 8601, UTC."""
    settings: dict[str, Any]
    slo: Slo
    slo_share: float
    """Of requests that must be good."""
    stages: tuple[Stage, ...]
    summaries: tuple[Summary, ...]
    """One per stage."""
    samples: tuple[Sample, ...]
    memory: tuple[MemorySample, ...]
    """Of the server's processes; empty when they were not watched."""
    kill_times_s: tuple[float, ...]
    """When its engine was killed."""
    seeks_knee: bool
    """The stages are a ramp to saturation."""
    disagreements: tuple[str, ...] | None
    """Between the server's counters and ours; None when they were not compared."""


def print_tables(run: Run, console: Console) -> None:
    for summary in run.summaries:
        console.print(_table(summary))
        console.print(_facts(summary, run.slo))
    if len(run.samples) > 1:
        rows = acceptance(run.samples[0], run.samples[-1])
        depths = ", ".join(f"{d}: {a / o:.2f}" for d, o, a in rows if o)
        if depths:
            console.print(f"drafts accepted by depth: {depths}")
    for line in _notes(run):
        console.print(line)


def _notes(run: Run) -> list[str]:
    """What is said of the run as a whole."""
    notes = [_kinds(run)]
    if run.seeks_knee:
        notes.append(_knee(run.summaries))
        notes.append(_capacity(run))
    if run.kill_times_s:
        notes.append(f"engine killed {len(run.kill_times_s)} times")
    if len(run.memory) > 1:
        notes += _memory(run.memory, max((s.parked_bytes for s in run.samples), default=0.0))
    if run.disagreements is not None:
        notes += run.disagreements or ("server and clients agree on all counts",)
    return [note for note in notes if note]


def _kinds(run: Run) -> str:
    """How each kind of request ended, if there are several."""
    outcomes: dict[str, Counter[str]] = {}
    for stage in run.stages:
        for record in stage.records:
            outcomes.setdefault(record.kind, Counter())[record.label] += 1
    if len(outcomes) < 2:
        return ""
    return "; ".join(
        f"{kind}: " + ", ".join(f"{label} {count}" for label, count in sorted(found.items()))
        for kind, found in sorted(outcomes.items())
    )


def _knee(summaries: tuple[Summary, ...]) -> str:
    found = knee(summaries)
    if found is None:
        return "no knee: nothing was answered"
    ttft = found.get("ttft")
    waits = "" if ttft is None else f", TTFT {ttft.at(50) * 1000:,.0f} ms (p50)"
    if not is_saturated(summaries):
        return f"not saturated by {found.name}: {found.tokens_per_s:,.1f} tokens/s{waits}"
    return f"knee at {found.name}: {found.tokens_per_s:,.1f} tokens/s{waits}; more clients only wait longer"


def _capacity(run: Run) -> str:
    if not run.slo.limits:
        return ""
    found = capacity(run.summaries, share=run.slo_share)
    asked = f"{run.slo.describe()} for {run.slo_share:.0%} of the requests"
    return f"{found.name} meet {asked}" if found else f"not even one client meets {asked}"


def _memory(samples: tuple[MemorySample, ...], parked_bytes: float) -> list[str]:
    mib = 1 << 20
    rows = (
        ("server", [sample.server_bytes / mib for sample in samples]),
        ("engine", [sample.engine_bytes / mib for sample in samples]),
    )
    return [
        f"memory of the {name}, MiB: {values[0]:,.1f} at first, {max(values):,.1f} at most, "
        f"{values[len(values) // 2]:,.1f} halfway, {values[-1]:,.1f} at last"
        for name, values in rows
    ] + ([f"of the engine's, {parked_bytes / mib:,.1f} MiB parked at most"] if parked_bytes else [])


def _table(summary: Summary) -> Table:
    table = Table(title=f"{summary.name}: {summary.num_requests} requests", title_justify="left")
    table.add_column("ms", no_wrap=True)
    for name in ("mean", *(f"p{percent:g}" for percent in _SHOWN), "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for metric, label in _METRICS:
        found = summary.get(metric)
        if found is not None:
            values = (found.mean, *map(found.at, _SHOWN), found.maximum)
            table.add_row(label, *(_ms(value) for value in values))
    return table


def _ms(seconds: float) -> str:
    """With a decimal as long as the columns of a narrow terminal hold it."""
    ms = seconds * 1000
    return f"{ms:,.1f}" if ms < 1000 else f"{ms:,.0f}"


def _facts(summary: Summary, slo: Slo) -> str:
    lines = [
        f"{summary.tokens_per_s:,.1f} output tokens/s, {summary.prompt_tokens_per_s:,.1f} prompt tokens/s, "
        f"{summary.requests_per_s:,.2f} requests/s over {summary.window_s:,.1f} s",
        "outcomes: " + ", ".join(f"{label} {count}" for label, count in summary.outcomes),
    ]
    if summary.num_unexpected:
        lines.append(f"{summary.num_unexpected} requests ended otherwise than they should have")
    if summary.num_usage_wrong:
        lines.append(
            f"usage disagrees with the stream in {summary.num_usage_wrong} of {summary.num_usage_checked} answers"
        )
    if slo.limits:
        lines.append(
            f"goodput: {summary.goodput_per_s:,.2f} requests/s; {summary.good_share:.1%} met {slo.describe()}"
        )
    return "\n".join(lines) + "\n"


def write_json(run: Run, path: Path) -> None:
    """All settings, figures, samples and requests; times in seconds after the start of the first stage."""
    origin_s = run.stages[0].start_s
    payload = {
        "schema": _SCHEMA,
        "started_at": run.started_at,
        "settings": run.settings,
        "slo": dict(run.slo.limits),
        "stages": [_summary_fields(summary) for summary in run.summaries],
        "notes": _notes(run),
        "disagreements": run.disagreements,
        "kill_times_s": [time_s - origin_s for time_s in run.kill_times_s],
        "memory": [
            {**dataclasses.asdict(sample), "time_s": sample.time_s - origin_s}
            for sample in run.memory
        ],
        "samples": [
            {**dataclasses.asdict(sample), "time_s": sample.time_s - origin_s}
            for sample in run.samples
        ],
        "requests": [
            _record_fields(stage.name, record, origin_s)
            for stage in run.stages
            for record in stage.records
        ],
    }
    path.write_bytes(orjson.dumps(payload, option=orjson.OPT_INDENT_2))


def _summary_fields(summary: Summary) -> dict[str, Any]:
    return {
        **dataclasses.asdict(summary),
        "outcomes": dict(summary.outcomes),
        "distributions": {
            name: {
                "count": found.count,
                "mean_s": found.mean,
                "min_s": found.minimum,
                "max_s": found.maximum,
                **{
                    f"p{percent:g}_s": value
                    for percent, value in zip(PERCENTILES, found.percentiles, strict=True)
                },
            }
            for name, found in summary.distributions
        },
        "requests_per_s": summary.requests_per_s,
        "tokens_per_s": summary.tokens_per_s,
        "prompt_tokens_per_s": summary.prompt_tokens_per_s,
        "goodput_per_s": summary.goodput_per_s,
        "good_share": summary.good_share,
    }


def _record_fields(stage: str, record: RequestRecord, origin_s: float) -> dict[str, Any]:
    return {
        "stage": stage,
        "kind": record.kind,
        "outcome": record.label,
        "expected": record.expected,
        "intended_start_s": record.intended_start_s - origin_s,
        "start_s": record.start_s - origin_s,
        "end_s": record.end_s - origin_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.e2e_s,
        "num_chunks": len(record.chunk_times_s),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
    }


def write_csv(run: Run, path: Path) -> None:
    """One row per request."""
    origin_s = run.stages[0].start_s
    rows = [
        _record_fields(stage.name, record, origin_s)
        for stage in run.stages
        for record in stage.records
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["stage"])
        writer.writeheader()
        writer.writerows(rows)


def write_html(run: Run, path: Path) -> None:
    """One page that needs nothing else: figures as tables, plots as inline SVG."""
    settings = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in run.settings.items()
    )
    tables = "".join(_html_table(summary, run.slo) for summary in run.summaries)
    plots = "".join(_plots(run))
    notes = "".join(f"<p>{escape(note)}</p>" for note in _notes(run))
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Load test</title>'
        f"<style>{_STYLE}</style><h1>Load test, {escape(run.started_at)}</h1>"
        f"<table>{settings}</table>{notes}{tables}<div class=plots>{plots}</div></html>\n",
        encoding="utf-8",
    )


_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}"
    "th,td{padding:.15em .8em;border-bottom:1px solid #8884;text-align:right}"
    "th:first-child,td:first-child{text-align:left}h2{margin-bottom:0}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26em,1fr));gap:1em}"
    "svg{width:100%;height:auto}"
)


def _html_table(summary: Summary, slo: Slo) -> str:
    names = ("mean", *(f"p{percent:g}" for percent in PERCENTILES), "max")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = ""
    for metric, label in _METRICS:
        found = summary.get(metric)
        if found is not None:
            values = (found.mean, *found.percentiles, found.maximum)
            cells = "".join(f"<td>{_ms(value)}</td>" for value in values)
            rows += f"<tr><th>{label}</th>{cells}</tr>"
    facts = escape(_facts(summary, slo)).replace("\n", "<br>")
    return (
        f"<h2>{escape(summary.name)}</h2><p>{facts}</p>"
        f"<table><tr><th>ms</th>{head}</tr>{rows}</table>"
    )


def _plots(run: Run) -> list[str]:
    plots = [
        line_chart(
            f"{label}: share of requests within", "ms", "", _cumulative(run, metric), y_max=1.0
        )
        for metric, label in (("ttft", "Time to first token"), ("e2e", "Whole request"))
    ]
    plots.append(
        line_chart(
            "Output tokens per second over time",
            "s",
            "tokens/s",
            [Series(stage.name, tokens_over_time(stage, 1.0)) for stage in run.stages],
        )
    )
    plots += _concurrency_plots(run)
    plots += _server_plots(run)
    if len(run.memory) > 1:
        plots.append(_memory_plot(run))
    return plots


def _cumulative(run: Run, metric: str) -> list[Series]:
    series: list[Series] = []
    for stage in run.stages:
        ok = [record for record in stage.records if record.outcome is Outcome.OK]
        values = sorted(
            value * 1000
            for record in ok
            if (value := record.ttft_s if metric == "ttft" else record.e2e_s) is not None
        )
        points = [(value, (rank + 1) / len(values)) for rank, value in enumerate(values)]
        series.append(Series(stage.name, points))
    return series


def _concurrency_plots(run: Run) -> list[str]:
    stages = [summary for summary in run.summaries if summary.concurrency is not None]
    if len(stages) < 2:
        return []
    ttft: dict[str, list[tuple[float, float]]] = {"p50": [], "p95": []}
    for summary in stages:
        found = summary.get("ttft")
        if found is not None and summary.concurrency is not None:
            ttft["p50"].append((summary.concurrency, found.at(50) * 1000))
            ttft["p95"].append((summary.concurrency, found.at(95) * 1000))
    rates = [(float(s.concurrency or 0), s.tokens_per_s) for s in stages]
    return [
        line_chart(
            "Time to first token by clients",
            "clients",
            "ms",
            [Series(name, points) for name, points in ttft.items()],
        ),
        line_chart(
            "Output tokens per second by clients", "clients", "tokens/s", [Series("", rates)]
        ),
    ]


def _server_plots(run: Run) -> list[str]:
    samples = [sample for sample in run.samples if sample.slots_busy is not None]
    if len(samples) < 2:
        return []
    origin_s = run.stages[0].start_s
    rates = [
        (after.time_s - origin_s, rate)
        for before, after in zip(samples, samples[1:], strict=False)
        if (rate := acceptance_rate(before, after)) is not None
    ]
    return [
        line_chart(
            "Slots and queue, as the server says",
            "s",
            "",
            [
                Series("slots busy", [(s.time_s - origin_s, s.slots_busy or 0.0) for s in samples]),
                Series("queued", [(s.time_s - origin_s, s.queue_length or 0.0) for s in samples]),
            ],
        ),
        line_chart("Accepted of verified drafts", "s", "", [Series("", rates)], y_max=1.0),
    ]


def _memory_plot(run: Run) -> str:
    origin_s, mib = run.stages[0].start_s, 1 << 20
    return line_chart(
        "Memory of the server's processes",
        "s",
        "MiB",
        [
            Series("server", [(m.time_s - origin_s, m.server_bytes / mib) for m in run.memory]),
            Series("engine", [(m.time_s - origin_s, m.engine_bytes / mib) for m in run.memory]),
            Series("parked", [(s.time_s - origin_s, s.parked_bytes / mib) for s in run.samples]),
        ],
    )
