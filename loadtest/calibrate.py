"""`python -m loadtest.calibrate`: how far the reported figures are from what a server really did.

The arithmetic is proved in the tests on a virtual clock; this shows what the real client and machine add. The mock
server keeps when each request arrived and when each chunk went out. These times, not the planned ones, are what the
figures are held against, because a timer of the server's that fires late is no fault of the tool. Answers differ in
length, so that the clients do not stay in step and wait for each other at the server's door. Exit code 1 when a figure
is off by more than 2 % and 1 ms; run it on an idle machine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.config import Limits, Slo, Target
from loadtest.driver import Driver, http_client
from loadtest.server_process import free_port, running
from loadtest.stats import distribution, summarize
from loadtest.workload import Conversation

if TYPE_CHECKING:
    from loadtest.driver import Stage
    from loadtest.stats import Distribution

_SHARE = 0.02
_ABSOLUTE_S = 0.001
_WARMUP_S = 1.0
_PERCENTILES = (50, 90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure; times in seconds, rates per second."""

    name: str
    planned: float | None
    """What the server was told to do; None if that differs from request to request."""
    served: float
    """What it did."""
    reported: float
    is_time: bool

    @property
    def is_close(self) -> bool:
        allowed = max(_SHARE * self.served, _ABSOLUTE_S if self.is_time else 0.0)
        return abs(self.reported - self.served) <= allowed


def main(
    ttft_ms: Annotated[float, typer.Option(min=1)] = 200.0,
    itl_ms: Annotated[float, typer.Option(min=1)] = 20.0,
    tokens: Annotated[int, typer.Option(min=4, help="Of an answer, on average.")] = 40,
    clients: Annotated[int, typer.Option(min=1)] = 4,
    seconds: Annotated[float, typer.Option(min=3)] = 15.0,
) -> None:
    """Measure the mock server and compare."""
    port = free_port()
    command = [sys.executable, "-m", "loadtest.mock_server", "--port", str(port)]
    command += ["--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "mock.log"
        with running(command, port=port, ready_path="/health", log=log) as server:
            stage, served = asyncio.run(_measure(server.root_url, tokens, clients, seconds))
    found = compare(stage, served, {"ttft": ttft_ms / 1000, "itl": itl_ms / 1000})
    Console().print(_table(found, f"{len(stage.records)} requests of {clients} clients"))
    raise typer.Exit(0 if all(figure.is_close for figure in found) else 1)


def compare(
    stage: Stage, served: Sequence[Sequence[float]], planned: dict[str, float]
) -> list[Comparison]:
    """The figures of a stage against the server's own times: [arrival, chunk, chunk, ...] of each stream."""
    summary = summarize(stage, warmup_s=_WARMUP_S, slo=Slo())
    window = (stage.start_s + _WARMUP_S, stage.measured_until_s)
    inside = [times for times in served if times[0] >= window[0] and len(times) > 1]
    done = {
        "ttft": [times[1] - times[0] for times in inside],
        "itl": [b - a for times in inside for a, b in itertools.pairwise(times[1:])],
        "e2e": [times[-1] - times[0] for times in inside],
    }
    found = [
        Comparison(
            name=f"{name}, p{percent}",
            planned=planned.get(name),
            served=_distribution(values).at(percent),
            reported=(summary.get(name) or _distribution([])).at(percent),
            is_time=True,
        )
        for name, values in done.items()
        for percent in _PERCENTILES
    ]
    sent = sum(window[0] <= time_s <= window[1] for times in served for time_s in times[1:])
    found.append(
        Comparison(
            name="tokens/s",
            planned=None,
            served=sent / summary.window_s,
            reported=summary.tokens_per_s,
            is_time=False,
        )
    )
    return found


def _distribution(values: list[float]) -> Distribution:
    found = distribution(values)
    if found is None:
        raise ValueError("no request began and ended after the warm-up: measure for longer")
    return found


def _table(found: list[Comparison], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("figure", "planned", "served", "reported", "off by"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for figure in found:
        factor, unit = (1000, " ms") if figure.is_time else (1, "")
        values = (figure.planned, figure.served, figure.reported)
        table.add_row(
            figure.name,
            *("" if value is None else f"{value * factor:,.2f}{unit}" for value in values),
            f"{figure.reported / figure.served - 1:+.2%}" + ("" if figure.is_close else " (!)"),
        )
    return table


async def _measure(
    root_url: str, tokens: int, clients: int, seconds: float
) -> tuple[Stage, list[list[float]]]:
    target = Target(base_url=f"{root_url}/v1", model="mock", api_key=None, timeout_s=60.0)
    limits = Limits(max_requests=1_000_000, duration_s=seconds, warmup_s=_WARMUP_S)
    async with http_client(target) as http:
        driver = Driver(
            http=http,
            target=target,
            limits=limits,
            source=_conversations(tokens),
        )
        stage = await driver.closed_loop(clients)
        served: list[list[float]] = (await http.get(f"{root_url}/served")).json()
    return stage, served


def _conversations(tokens: int) -> Iterator[Conversation]:
    rng = random.Random(0)
    while True:
        num_tokens = rng.randint(tokens // 2, tokens + tokens // 2)
        yield Conversation(turns=("hello",), max_tokens=num_tokens)


if __name__ == "__main__":
    typer.run(main)
