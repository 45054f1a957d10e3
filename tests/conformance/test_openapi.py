"""The document at /openapi.json, and requests that are made from it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.applications import Starlette
from starlette.routing import Route

from engine.fake import FakeEngine, FakeScript
from gateway.openapi import openapi_document
from tests.conformance.live import MODEL, chat_body, live_server, says

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.live import Live

SMALL = FakeScript(max_context=200)
"""Requests without a limit end soon."""
DOCUMENT: Any = openapi_document("test", FakeEngine(SMALL).info)
PATHS: dict[str, Any] = DOCUMENT["paths"]
POSTED = [path for path, methods in PATHS.items() if "post" in methods]
READ = [path for path, methods in PATHS.items() if "get" in methods]
TOGETHER = {
    # What the document leaves to the 400: fields that depend on others, on the vocabulary or on the compiler.
    "add_generation_prompt", "continue_final_message", "enable_thinking", "ignore_eos", "include", "logit_bias",
    "logprobs", "max_completion_tokens", "min_tokens", "output_config", "prompt", "reasoning", "reasoning_effort",
    "response_format", "stream_options", "structured_outputs", "text", "thinking", "thinking_budget", "tool_choice",
    "tools", "top_logprobs",
    # ... and the order of roles, which is the template's, and text in which JSON is written.
    "messages", "input", "system",
}  # fmt: skip
TEMPLATE = "the chat template refused"


async def test_the_document_is_served_and_has_every_path() -> None:
    async with live_server(SMALL) as live:
        response = await live.client.get("/openapi.json")
        assert response.json() == DOCUMENT
        app = live.server.config.app
    assert isinstance(app, Starlette)
    routes = [route for route in app.routes if isinstance(route, Route)]
    routes = [r for r in routes if not r.path.startswith("/page") and r.path != "/openapi.json"]
    for method, documented in (("POST", POSTED), ("GET", READ)):
        served = {r.path.replace(":path", "") for r in routes if method in (r.methods or ())}
        assert served - {"/"} == set(documented)


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)
    referred = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(DOCUMENT)))
    # Chunks are named in words only: a schema of a stream has no place in this version of OpenAPI.
    assert set(schemas) == referred | {"ChatChunk"}


async def test_counting_takes_what_its_schema_says_beyond_context_and_vocabulary() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    validator = jsonschema_rs.Draft202012Validator(
        {**schemas["CountRequest"], "components": {"schemas": schemas}}
    )
    fields = chat_body(max_tokens=10**6, min_tokens=10**5, stop_token_ids=[10**6])
    validator.validate(fields)
    async with live_server(SMALL) as live:
        assert (await live.client.post("/v1/messages/count_tokens", json=fields)).is_success


async def test_chunks_are_what_their_schema_says() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    schema = {**schemas["ChatChunk"], "components": {"schemas": schemas}}
    fields = chat_body(
        stream=True, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}, n=2
    )
    validator = jsonschema_rs.Draft202012Validator(schema)
    async with live_server(says("<think>a</think>b")) as live:
        text = (await live.client.post("/v1/chat/completions", json=fields)).text
    *chunks, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    for chunk in chunks:
        validator.validate(json.loads(chunk.removeprefix("data: ")))


QUICK: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "phases": (Phase.generate,),  # making a failure smaller takes minutes
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
}


def with_model(case: schemathesis.Case[Any]) -> schemathesis.Case[Any]:
    """The same for the model that is served."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    if case.path_parameters:
        case.path_parameters["model"] = MODEL
    return case


def without_whole_floats(value: Any) -> Any:
    """JSON Schema takes 3.0 for a whole number, and this server does not."""
    if isinstance(value, dict):
        return {key: without_whole_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_whole_floats(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def checker(live: Live, path: str, method: str, examples: int) -> Callable[[], None]:
    """A function that sends good and bad requests to a path; answers must be as the document says."""
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]
    cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if method == "POST":
        cases |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @settings(max_examples=examples, **QUICK)
    @given(case=cases)
    def check(case: schemathesis.Case[Any]) -> None:
        # What each field may be does not make the whole possible; the next test looks at that.
        with_model(case).call_and_validate(
            base_url=live.url, timeout=10, excluded_checks=[positive_data_acceptance]
        )

    return check


def acceptance_checker(live: Live, path: str, examples: int) -> Callable[[], int]:
    """A function that sends good requests and counts those that are taken; the others must say why not."""
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path]["POST"]
    accepted = 0

    @settings(max_examples=examples, **QUICK)
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: schemathesis.Case[Any]) -> None:
        nonlocal accepted
        case.body = without_whole_floats(case.body)
        response = with_model(case).call(base_url=live.url, timeout=10)
        accepted += response.status_code == 200
        if response.status_code == 200:
            return
        error = response.json()["error"]
        assert response.status_code == 400, error
        message = error["message"]
        named = re.split(r"[.\[]", error.get("param") or message.split()[0])[0]
        is_too_long = (
            error.get("code") == "context_length_exceeded" or "the context holds" in message
        )
        assert is_too_long or message.startswith(TEMPLATE) or named in TOGETHER, error

    def run() -> int:
        check()
        return accepted

    return run


async def run(path: str, method: str, examples: int) -> None:
    async with live_server(SMALL) as live:
        await asyncio.to_thread(checker(live, path, method, examples))
        await live.wait_idle()
        assert (await live.client.get("/ready")).status_code == 200


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", POSTED)
async def test_no_request_made_from_it_is_a_servers_fault(path: str) -> None:
    await run(path, "POST", 6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", READ)
async def test_what_is_read_is_as_it_says(path: str) -> None:
    await run(path, "GET", 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", POSTED)
async def test_none_of_many_is(path: str) -> None:
    await run(path, "POST", 500)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", POSTED)
async def test_what_it_allows_is_taken_unless_fields_contradict_each_other(path: str) -> None:
    async with live_server(SMALL) as live:
        num_accepted = await asyncio.to_thread(acceptance_checker(live, path, 6))
    assert num_accepted > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", POSTED)
async def test_much_of_what_it_allows_is_taken(path: str) -> None:
    async with live_server(SMALL) as live:
        num_accepted = await asyncio.to_thread(acceptance_checker(live, path, 300))
    assert num_accepted > 30
