"""The document at /openapi.json, and requests that are made from it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from engine.fake import FakeScript
from gateway.openapi import openapi_document
from tests.conformance.live import MODEL, live_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.live import Live

PATHS = openapi_document("1")["paths"]
assert isinstance(PATHS, dict)
POSTED = [path for path, methods in PATHS.items() if "post" in methods]
SMALL = FakeScript(max_context=200)
"""Requests without a limit end soon."""


async def test_the_document_is_served_and_has_every_generating_path() -> None:
    async with live_server() as live:
        response = await live.client.get("/openapi.json")
        assert response.json() == openapi_document("test")
        app = live.server.config.app
    assert isinstance(app, Starlette)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert {route.path for route in routes if "POST" in (route.methods or ())} == set(POSTED)


def checker(live: Live, path: str, examples: int) -> Callable[[], None]:
    """A function that sends good and bad requests to a path."""
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_dict(openapi_document("test"))
    operation = schema[path]["POST"]
    cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    cases |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ],
    )
    @given(case=cases)
    def check(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL
        # What each field may be does not make the whole possible: a prompt may be too long, a template may refuse.
        case.call_and_validate(
            base_url=live.url, timeout=10, excluded_checks=[positive_data_acceptance]
        )

    return check


async def run(path: str, examples: int) -> None:
    async with live_server(SMALL) as live:
        await asyncio.to_thread(checker(live, path, examples))
        await live.wait_idle()
        assert (await live.client.get("/ready")).status_code == 200


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", POSTED)
async def test_no_request_made_from_it_is_a_servers_fault(path: str) -> None:
    await run(path, 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", POSTED)
async def test_none_of_many_is(path: str) -> None:
    await run(path, 500)
