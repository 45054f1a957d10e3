"""Traces of requests: the spans that a collector gets, and what it never gets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engine.fake import FakeScript, Fault, FaultKind
from gateway.config import ApiKey, GatewayConfig
from gateway.tracing import open_tracer
from tests.conformance.live import Live, chat_body, ids_of, live_server, says

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

CHAT = "/v1/chat/completions"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


class Traced:
    """A live server and the spans that it has sent."""

    def __init__(self, live: Live, exporter: InMemorySpanExporter) -> None:
        self.live = live
        self._exporter = exporter

    async def spans(self, count: int) -> list[ReadableSpan]:
        """The spans so far, which must be so many, in the order in which they began."""
        await self.live.wait_idle()
        async with asyncio.timeout(5):
            while len(found := self._exporter.get_finished_spans()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert len(found) == count
        return sorted(found, key=lambda span: span.start_time or 0)


@asynccontextmanager
async def traced_server(
    script: FakeScript, config: GatewayConfig | None = None
) -> AsyncGenerator[Traced]:
    exporter = InMemorySpanExporter()
    tracer = open_tracer("http://127.0.0.1:9", "test", SimpleSpanProcessor(exporter))
    async with live_server(script, config=config, tracer=tracer) as live:
        yield Traced(live, exporter)
    tracer.close()


def check_nesting(spans: list[ReadableSpan]) -> None:
    """Parts lie in the request one behind the other, each with both its ends."""
    request, *parts = spans
    assert request.context is not None
    for part in parts:
        assert part.parent is not None
        assert part.parent.span_id == request.context.span_id
        assert part.start_time is not None and part.end_time is not None
        assert request.start_time is not None and request.end_time is not None
        slack_ns = 2_000_000  # two clocks are read
        assert request.start_time - slack_ns <= part.start_time <= part.end_time
        assert part.end_time <= request.end_time + slack_ns


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_has_its_queue_prefill_and_windows(streamed: bool) -> None:
    script = says("secret answer", decode_s=0.002)
    async with traced_server(script) as traced:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
        body = chat_body("secret prompt", stream=streamed)
        await traced.live.client.post(CHAT, json=body, headers=headers)
        spans = await traced.spans(4)
    assert [span.name for span in spans] == [f"POST {CHAT}", "queue", "prefill", "windows"]
    check_nesting(spans)
    request, _, prefill, windows = spans
    assert request.context is not None and request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    attributes = dict(request.attributes or {})
    num_output = len(ids_of("secret answer"))
    assert attributes["http.response.status_code"] == 200
    assert attributes["stratagate.request_id"] == "mine"
    assert attributes["gen_ai.usage.output_tokens"] == num_output
    read = dict(prefill.attributes or {})
    assert read["stratagate.prompt_tokens"] == attributes["gen_ai.usage.input_tokens"]
    written = dict(windows.attributes or {})
    assert written["stratagate.completion_tokens"] == num_output
    # One span for all windows: the first token came with the prompt.
    assert 0 < int(str(written["stratagate.windows"])) < num_output
    assert written["stratagate.outcome"] == "stop"
    resource = dict(request.resource.attributes)
    assert (resource["service.name"], resource["service.version"]) == ("stratagate", "test")
    assert not any("secret" in span.to_json() for span in spans)


async def test_every_choice_has_spans_of_its_own() -> None:
    async with traced_server(FakeScript()) as traced:
        await traced.live.client.post(CHAT, json=chat_body(n=2, max_tokens=5, ignore_eos=True))
        spans = await traced.spans(7)
    choices = [(span.attributes or {}).get("stratagate.choice") for span in spans]
    assert sorted(choices[1:], key=str) == [0, 0, 0, 1, 1, 1]


async def test_a_trace_that_is_not_sampled_stays_so() -> None:
    async with traced_server(FakeScript()) as traced:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        await traced.live.client.post(CHAT, json=chat_body(max_tokens=2), headers=headers)
        bad = {"traceparent": "nonsense"}
        await traced.live.client.post(CHAT, json=chat_body(max_tokens=2), headers=bad)
        request, *_ = await traced.spans(4)
    assert request.parent is None


async def test_what_ends_badly_says_so() -> None:
    script = FakeScript(faults=(Fault(window=2, kind=FaultKind.SLOT, slot=0),))
    async with traced_server(script) as traced:
        await traced.live.client.post(CHAT, json=chat_body(stream=True, ignore_eos=True))
        request, _, _, windows = await traced.spans(4)
    assert request.status.status_code is windows.status.status_code is StatusCode.ERROR
    assert dict(windows.attributes or {})["stratagate.outcome"] == "failed"


async def test_a_client_that_leaves_ends_its_trace() -> None:
    async with traced_server(FakeScript(decode_s=0.01)) as traced:
        body = chat_body(stream=True, max_tokens=4000, ignore_eos=True)
        async with traced.live.client.stream("POST", CHAT, json=body) as response:
            async for line in response.aiter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    break
        *_, windows = await traced.spans(4)
    assert dict(windows.attributes or {})["stratagate.outcome"] == "cancelled"
    assert windows.status.status_code is StatusCode.UNSET


async def test_refusals_are_traced_and_reads_are_not() -> None:
    config = GatewayConfig(port=0, api_keys=(ApiKey(name="ann", secret="key"),))
    async with traced_server(FakeScript(), config) as traced:
        client = traced.live.client
        await client.get("/health")
        await client.get("/v1/models")
        await client.post(CHAT, json={})
        key = {"authorization": "Bearer key"}
        await client.post(CHAT, json={}, headers=key)
        await client.post("/v1/what/secret", json={}, headers=key)
        spans = await traced.spans(3)
    found = [(span.name, dict(span.attributes or {})) for span in spans]
    assert [name for name, _ in found] == [f"POST {CHAT}", f"POST {CHAT}", "POST"]
    codes = [attributes["http.response.status_code"] for _, attributes in found]
    assert codes == [401, 400, 404]
    assert found[1][1]["stratagate.key"] == "ann"
    assert not any("secret" in span.to_json() for span in spans)


class Collector(BaseHTTPRequestHandler):
    """Notes what it is sent."""

    got: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.got.append((self.path, self.rfile.read(length)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_spans_reach_a_collector(path: str) -> None:
    handler = type("Handler", (Collector,), {"got": list[tuple[str, bytes]]()})
    with HTTPServer(("127.0.0.1", 0), handler) as collector:
        thread = Thread(target=collector.serve_forever)
        thread.start()
        try:
            tracer = open_tracer(f"http://127.0.0.1:{collector.server_port}{path}", "test")
            async with live_server(FakeScript(), tracer=tracer) as live:
                await live.client.post(CHAT, json=chat_body(max_tokens=2))
            await asyncio.to_thread(tracer.close)
        finally:
            collector.shutdown()
            thread.join()
    paths = [path for path, _ in handler.got]
    assert paths == ["/v1/traces"]
    assert b"prefill" in handler.got[0][1]


def test_without_the_extra_a_start_with_traces_is_refused() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from gateway.cli import app\n"
        "app(['serve', '--otlp-endpoint', 'http://127.0.0.1:4318', '--port', '0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--otlp-endpoint" in line
    assert "stratagate[otel]" in line


def test_the_gateway_needs_no_telemetry_package() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\nimport gateway.app, gateway.server\n"
        "assert not any(m.startswith('opentelemetry.') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
