"""`python -m loadtest.calibrate`: how far the reported figures are from the times of a server that is known exactly.

The arithmetic is proved in the tests on a virtual clock; this shows what the real client and machine add. Run it on
an idle machine: a busy one delays client and server alike. Exit code 1 when a figure is off by more than 2 % and 1 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.config import Limits, Slo, Target
from loadtest.driver import Driver, http_client
from loadtest.server_process import free_port, running
from loadtest.stats import Summary, summarize
from loadtest.workload import Conversation

_SHARE = 0.02
_ABSOLUTE_S = 0.001
_WARMUP_S = 1.0


def main(
    ttft_ms: Annotated[float, typer.Option(min=1)] = 200.0,
    itl_ms: Annotated[float, typer.Option(min=1)] = 20.0,
    tokens: Annotated[int, typer.Option(min=2)] = 40,
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
            summary = asyncio.run(_measure(f"{server.root_url}/v1", tokens, clients, seconds))
    ttft_s, itl_s = ttft_ms / 1000, itl_ms / 1000
    e2e_s = ttft_s + itl_s * (tokens - 1)
    table = Table(
        title=f"{summary.num_requests} requests of {clients} clients", title_justify="left"
    )
    for column in ("figure", "known", "reported", "off by"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    good = True
    for name, known, unit in (
        ("ttft", ttft_s, "ms"),
        ("itl", itl_s, "ms"),
        ("tpot", itl_s, "ms"),
        ("e2e", e2e_s, "ms"),
        ("tokens/s", clients * tokens / e2e_s, ""),
    ):
        found = summary.get(name)
        reported = found.at(50) if found is not None else summary.tokens_per_s
        good &= abs(reported - known) <= max(_SHARE * known, _ABSOLUTE_S if unit else 0.0)
        factor = 1000 if unit else 1
        table.add_row(
            f"{name}, median" if unit else name,
            f"{known * factor:,.2f} {unit}",
            f"{reported * factor:,.2f} {unit}",
            f"{reported / known - 1:+.2%}",
        )
    Console().print(table)
    raise typer.Exit(0 if good else 1)


async def _measure(base_url: str, tokens: int, clients: int, seconds: float) -> Summary:
    target = Target(base_url=base_url, model="mock", api_key=None, timeout_s=60.0)
    limits = Limits(max_requests=1_000_000, duration_s=seconds, warmup_s=_WARMUP_S)
    async with http_client(target) as http:
        driver = Driver(
            http=http,
            target=target,
            limits=limits,
            source=itertools.repeat(Conversation(turns=("hello",), max_tokens=tokens)),
        )
        stage = await driver.closed_loop(clients)
    return summarize(stage, warmup_s=_WARMUP_S, slo=Slo())


if __name__ == "__main__":
    typer.run(main)
