"""OpenTelemetry traces, an extra: a span for each POST, and below it where each of its sequences spent its time.

Spans are written when the request is over, from the times that were taken anyway, so tracing costs nothing per token.
They have counts, times and ids, never a word of a prompt or an answer. Nothing here imports OpenTelemetry before
`open_tracer` is called.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from gateway.errors import ConfigError
from gateway.generation import FAILED
from gateway.middleware import OWNER, REQUEST_ID

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gateway.generation import Generation, SequenceTimes

TRACED = "stratagate.traced"
"""Scope key, where requests are traced: the list that its generations are put into."""

_FLUSH_S = 2.0
"""How long a server that stops waits for the last spans to leave."""
_NS = 1_000_000_000
Attributes = dict[str, str | int]


class RequestTracer:
    """Writes the spans of requests that are over."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("stratagate")
        self._server_kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)
        self._below = set_span_in_context
        self._extract = TraceContextTextMapPropagator().extract

    def close(self) -> None:
        """Send what is left. Blocks until that is done, or for `_FLUSH_S`."""
        # A collector that is gone is tried again for longer than a server may take to stop.
        closing = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_FLUSH_S)

    def write(
        self, scope: Scope, status: int | None, generations: list[Generation], started_ns: int
    ) -> None:
        """The spans of one request that ends now; status: None when no answer was begun."""
        times = [sequence for generation in generations for sequence in generation.times()]
        # A path that nobody serves may say anything.
        name = f"POST {scope['path']}" if status not in (None, 404) else "POST"
        span = self._tracer.start_span(
            name,
            context=self._extract(_carrier(scope)),
            kind=self._server_kind,
            attributes=_request_attributes(scope, status, generations),
            start_time=started_ns,
        )
        if status is None or status >= 500 or any(item.outcome == FAILED for item in times):
            span.set_status(self._failed)
        below = self._below(span)
        for sequence in times:
            self._write_sequence(below, sequence)
        span.end()

    def _write_sequence(self, below: Context, times: SequenceTimes) -> None:
        # The scheduler counts seconds from nowhere; spans want the time of day.
        offset_ns = time.time_ns() - time.monotonic_ns()
        parts = _parts(times)
        for part in parts:
            is_last = part is parts[-1]
            span = self._tracer.start_span(
                part.name,
                context=below,
                attributes={"stratagate.choice": times.index, **part.attributes},
                start_time=int(part.start_s * _NS) + offset_ns,
            )
            if is_last:
                span.set_attribute("stratagate.outcome", times.outcome)
            if is_last and times.outcome == FAILED:
                span.set_status(self._failed)
            span.end(int(part.end_s * _NS) + offset_ns)


@dataclass(frozen=True, slots=True)
class _Part:
    """Where a sequence spent its time; seconds on the scheduler's clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes


def _parts(times: SequenceTimes) -> list[_Part]:
    """As far as the sequence came."""
    usage, started_s, first_s = times.usage, times.started_s, times.first_token_s
    parts = [_Part("queue", times.submitted_s, started_s or times.ended_s, {})]
    if started_s is not None:
        read: Attributes = {
            "stratagate.prompt_tokens": usage.prompt_tokens,
            "stratagate.cached_tokens": usage.cached_tokens,
        }
        parts.append(_Part("prefill", started_s, first_s or times.ended_s, read))
    if first_s is not None:
        written: Attributes = {
            "stratagate.windows": usage.windows,
            "stratagate.completion_tokens": usage.completion_tokens,
            "stratagate.drafted_tokens": usage.drafted_tokens,
            "stratagate.accepted_tokens": usage.accepted_tokens,
        }
        parts.append(_Part("windows", first_s, times.ended_s, written))
    return parts


class Tracing:
    """Outermost middleware: notes when a POST begins and how it is answered."""

    def __init__(self, app: ASGIApp, tracer: RequestTracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        generations: list[Generation] = []
        scope[TRACED] = generations
        status: int | None = None
        started_ns = time.time_ns()

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            self._tracer.write(scope, status, generations, started_ns)


def open_tracer(
    endpoint: str, version: str, processor: SpanProcessor | None = None
) -> RequestTracer:
    """A tracer that sends its spans to an OTLP collector over HTTP, in batches from a thread of its own.

    endpoint: the collector's base URL, or that of its traces. What OpenTelemetry's own environment variables say of
    headers, sampling and resources holds. processor: takes the spans instead of the collector.
    Raises ConfigError when the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "--otlp-endpoint needs the extra `otel`, which is not installed: "
            f"pip install 'stratagate[otel]' ({error})"
        ) from error
    own = {"service.name": "stratagate", "service.version": version}
    resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if processor is None:
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=_traces_url(endpoint)))
    provider.add_span_processor(processor)
    return RequestTracer(provider)


def _traces_url(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def _carrier(scope: Scope) -> dict[str, str]:
    headers = Headers(scope=scope)
    carrier: dict[str, str] = {}
    for name in ("traceparent", "tracestate"):
        with suppress(KeyError):  # a client need not send them
            carrier[name] = headers[name]
    return carrier


def _request_attributes(
    scope: Scope, status: int | None, generations: list[Generation]
) -> Attributes:
    attributes: Attributes = {"http.request.method": "POST"}
    if status is not None:
        attributes["http.response.status_code"] = status
    if status != 404:
        attributes["url.path"] = scope["path"]
    if request_id := scope.get(REQUEST_ID):
        attributes["stratagate.request_id"] = request_id
    if owner := scope.get(OWNER):
        attributes["stratagate.key"] = owner
    if generations:
        usages = [generation.usage for generation in generations]
        attributes["gen_ai.usage.input_tokens"] = sum(usage.prompt_tokens for usage in usages)
        attributes["gen_ai.usage.output_tokens"] = sum(usage.completion_tokens for usage in usages)
    return attributes
