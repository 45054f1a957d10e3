"""What every generating endpoint does: take the body, start the sequences, deliver the answer whole or streamed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect

from gateway.content_tokens import ContentSpans
from gateway.errors import InvalidRequest, ModelNotFound, UnsupportedMediaType
from gateway.generation import Choice, Generation
from gateway.json_input import SHORT_BYTES
from gateway.metrics import Meter
from gateway.middleware import ALLOWANCE, OWNER, REQUEST_ID
from gateway.output_parser import OutputParser
from gateway.stream import FrameResponse, FrameStream, writing_turn
from gateway.tracing import TRACED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sse_starlette import ServerSentEvent
    from starlette.requests import Request
    from starlette.responses import Response

    from gateway.generation import ChoiceDelta
    from gateway.preparation import PreparedChoice
    from gateway.routes import Service
    from gateway.stream import FrameWriter
    from gateway.wire import ChatRequest, GenerationOptions

DEFAULT_ALIAS = "default"
"""A name that every server answers to."""

_MAX_PARSERS = 2
"""Threads that read long bodies."""
_Result = TypeVar("_Result")


class Answering:
    """Parse is the endpoint's, spelling the writer's; what is between them is here."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._writing = writing_turn()
        self._parsing = anyio.CapacityLimiter(_MAX_PARSERS)

    async def metered(
        self,
        request: Request,
        endpoint: str,
        answer: Callable[[Request, Meter], Awaitable[_Result]],
    ) -> _Result:
        """Run an endpoint and count the request, however it ends."""
        meter = Meter(self._service.metrics, endpoint, time.monotonic, request.scope.get(ALLOWANCE))
        try:
            return await answer(request, meter)
        except BaseException as error:
            meter.failed(error)
            raise

    async def parsed(self, request: Request, parse: Callable[[bytes], _Result]) -> _Result:
        """What a body says. A long one is read in a thread. Raises UnsupportedMediaType and what `parse` raises.

        Cancellation waits for a thread that has begun.
        """
        body = await _json_body(request)
        if len(body) <= SHORT_BYTES:
            return parse(body)
        return await anyio.to_thread.run_sync(parse, body, limiter=self._parsing)

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound."""
        if model not in (self._service.model, DEFAULT_ALIAS):
            raise ModelNotFound(model, served=self._service.model)

    async def start_chat(self, request: Request, body: ChatRequest, meter: Meter) -> Generation:
        """Submit the sequences of a chat, whichever API it came by."""
        self.check_model(body.model)
        prepared = await self._service.preparer.chat(
            body, request_id=request.scope[REQUEST_ID], owner=request.scope[OWNER]
        )
        has_logprobs = body.options.top_logprobs is not None
        parsers = [
            OutputParser(
                in_thought=item.in_thought,
                tools=body.tools,
                spans=ContentSpans() if has_logprobs else None,
            )
            for item in prepared
        ]
        return self.start(request, prepared, body.options, parsers, meter)

    def start(
        self,
        request: Request,
        prepared: tuple[PreparedChoice, ...],
        options: GenerationOptions,
        parsers: list[OutputParser] | None,
        meter: Meter,
    ) -> Generation:
        """Submit sequences; without parsers all output is content.

        Raises InvalidRequest for more than could ever be admitted, and what `submit` raises.
        """
        capacity = self._service.scheduler.capacity
        if len(prepared) > capacity:
            raise InvalidRequest(
                f"{len(prepared)} choices were asked for at once; slots and queue hold {capacity}",
                param="n" if options.num_choices > 1 else "prompt",
            )
        files = self._service.files
        choices = [
            Choice(item, files, options.stop, None if parsers is None else parsers[item.index])
            for item in prepared
        ]
        generation = Generation(
            choices,
            self._service.scheduler.submit,
            counts_reasoning=parsers is not None and files.think_ids is not None,
            grammar_param="tools" if options.structure is None else options.structure.param,
        )
        meter.accepted(generation.prompt_tokens)
        if (traced := request.scope.get(TRACED)) is not None:
            traced.append(generation)
        return generation

    def stream(
        self,
        generation: Generation,
        writer: FrameWriter,
        meter: Meter,
        keep_alive: Callable[[], ServerSentEvent] | None = None,
    ) -> Response:
        """The answer as server-sent events."""
        config = self._service.config
        return FrameResponse(
            FrameStream(generation, writer, meter, self._writing),
            keepalive_s=config.keepalive_s,
            send_timeout_s=config.send_timeout_s,
            keep_alive=keep_alive,
        )

    async def collect(
        self,
        request: Request,
        generation: Generation,
        meter: Meter,
        add: Callable[[ChoiceDelta], object],
    ) -> None:
        """Give `add` every delta; a client that leaves ends it.

        Raises ClientDisconnect or what a sequence failed with.
        """

        def take(delta: ChoiceDelta) -> None:
            meter.delivered(delta.num_tokens)
            add(delta)

        async def run() -> None:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def end(error: Exception | None) -> None:
                if ended.done():  # whoever waited for it has left
                    return
                if error is None:
                    ended.set_result(None)
                else:
                    ended.set_exception(error)

            generation.start(take, end)
            await ended

        try:
            await _unless_disconnected(request, run)
        finally:
            generation.close()
        meter.ended(generation.outcome)


async def _json_body(request: Request) -> bytes:
    """The body of a request that says it is JSON, not compressed. Raises UnsupportedMediaType."""
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType("Content-Type", "application/json", content_type)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType("Content-Encoding", "left out", encoding)
    return await request.body()


async def _unless_disconnected(request: Request, work: Callable[[], Awaitable[None]]) -> None:
    """Run work while the client waits for it. Raises ClientDisconnect when it left, work then being cancelled."""
    has_left = False
    failure: Exception | None = None

    async def watch() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            await work()
        except Exception as error:  # raised again below, outside the group that would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if has_left:
        raise ClientDisconnect
