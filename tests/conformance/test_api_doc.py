"""docs/api.md has every path, error code, metric and part of the status that the server has, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.metrics_core import CounterMetricFamily

from cache.disk import DiskStats
from engine.fake import FakeEngine, FakeScript
from gateway.errors import INTERNAL, TABLE
from gateway.metrics import _disk
from gateway.openapi import openapi_document
from tests.conformance.live import MODEL

if TYPE_CHECKING:
    from tests.conformance.live import Live

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
NO_FILES = DiskStats(
    num_files=0, num_bytes=0, capacity_bytes=0, written=0, hits=0, evictions=0, failures=0
)


def rows(title: str) -> list[list[str]]:
    """The first table below a heading, by row and column, without its head."""
    text = TEXT.partition(f"# {title}\n")[2].partition("\n#")[0]
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return lines[2:]


def code(text: str) -> set[str]:
    """What is set as code."""
    return set(re.findall(r"`([^`]+)`", text))


def test_every_path_is_there() -> None:
    paths: dict[str, Any] = openapi_document("test", FakeEngine(FakeScript()).info)["paths"]  # type: ignore[assignment]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    written = {name for row in rows("The HTTP API") for name in code(row[0])}
    assert {name.replace("{id}", "{model}") for name in written} == served | {
        "GET /openapi.json",
        "GET /",
    }


def test_every_error_code_is_there() -> None:
    written = {name for row in rows("Errors") for name in code(row[1])}
    # Codes that have no class of their own, and those of classes that only serve as bases.
    own = {
        "context_length_exceeded",
        "not_found",
        "bad_request",
        "headers_too_large",
        "headers_timeout",
    }
    bases = {"unavailable", "request_failed"}
    assert written == {kind.code for kind in (*TABLE.values(), INTERNAL)} - bases | own


@pytest.mark.asyncio(loop_scope="module")
async def test_every_metric_is_there(live: Live) -> None:
    await live.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
    text = (await live.client.get("/metrics")).text
    served = set(re.findall(r"^# TYPE (\w+(?<!_created)) ", text, re.MULTILINE))
    for family in _disk(NO_FILES):
        ending = "_total" if isinstance(family, CounterMetricFamily) else ""
        served.add(f"{family.name}{ending}")
    written = {name for row in rows("GET /metrics") for name in code(row[0])}
    assert {name.partition("{")[0] for name in written} == served


@pytest.mark.asyncio(loop_scope="module")
async def test_every_part_of_the_status_is_there(live: Live) -> None:
    status: dict[str, Any] = (await live.client.get("/v1/status")).json()
    told = {name: code(row[1]) for row in rows("GET /v1/status") for name in code(row[0])}
    assert set(told) == set(status) - {"object"}
    for name, part in status.items():
        some = part[0] if isinstance(part, list) and part else part
        if isinstance(some, dict):
            assert set(some) <= told[name], name
