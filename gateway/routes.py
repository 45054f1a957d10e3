"""The endpoints: parse, call, respond."""

from __future__ import annotations

import hashlib
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import ModelNotFound, UnsupportedMediaType
from gateway.generation import Choice, Generation
from gateway.metrics import CONTENT_TYPE, Meter
from gateway.middleware import OWNER, REQUEST_ID
from gateway.output_parser import OutputParser
from gateway.replies import ChoiceText, LogprobWriter, ReplyHead, new_id, usage_reply
from gateway.responses import json_response
from gateway.stream import ChatChunks, CompletionChunks, FrameResponse, FrameStream
from gateway.wire import ChatRequest, parse_chat, parse_completion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from gateway.config import GatewayConfig
    from gateway.metrics import Metrics
    from gateway.model_files import ModelFiles
    from gateway.preparation import PreparedChoice, Preparer
    from gateway.replies import JsonReply
    from gateway.stream import ChunkWriter
    from gateway.wire import CompletionRequest
    from scheduler.service import Scheduler

DEFAULT_ALIAS = "default"
"""A name that every server answers to."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the endpoints work with; made once the engine is loaded."""

    config: GatewayConfig
    scheduler: Scheduler
    files: ModelFiles
    preparer: Preparer
    metrics: Metrics
    model: str
    """The name that answers carry."""
    created: int
    version: str

    @property
    def fingerprint(self) -> str:
        """Changes when the same seed may give another text."""
        info = self.scheduler.info
        facts = f"{self.version}|{info.model_name}|{info.device}|{info.dtype}|{info.kernels}"
        return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


class Endpoints:
    """Methods are Starlette endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._scheduler = service.scheduler
        self._logprobs = LogprobWriter(service.files.tokenizer)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        meter = self._meter("chat")
        try:
            return await self._chat(request, meter)
        except BaseException as error:
            meter.failed(error)
            raise

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions"""
        meter = self._meter("completions")
        try:
            return await self._completion(request, meter)
        except BaseException as error:
            meter.failed(error)
            raise

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        del request
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}"""
        self._check_model(request.path_params["model"])
        return json_response(self._model_card())

    async def health(self, request: Request) -> Response:
        """GET /health: whether the process should be left running."""
        del request
        is_live = not self._scheduler.fatal.is_set()
        state = str(self._scheduler.engine_state)
        status = "ok" if is_live else "failed"
        return json_response({"status": status, "engine": state}, 200 if is_live else 503)

    async def ready(self, request: Request) -> Response:
        """GET /ready: whether requests are taken now."""
        del request
        is_ready = self._scheduler.ready
        state = str(self._scheduler.engine_state)
        return json_response({"ready": is_ready, "engine": state}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        del request
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _chat(self, request: Request, meter: Meter) -> Response:
        body = parse_chat(await _json_body(request))
        self._check_model(body.model)
        prepared = await self._service.preparer.chat(
            body, request_id=request.scope[REQUEST_ID], owner=request.scope[OWNER]
        )
        generation = self._generate(prepared, body, meter)
        head = self._head("chatcmpl-")
        logprobs = self._logprobs if body.options.top_logprobs is not None else None
        if body.delivery.stream:
            return self._stream(head, generation, ChatChunks(logprobs), body, meter)
        texts = await self._collect(request, generation, meter)
        return json_response(
            {
                **head.head("chat.completion"),
                "choices": [
                    _chat_choice(index, text, logprobs) for index, text in enumerate(texts)
                ],
                "usage": usage_reply(generation.usage),
            }
        )

    async def _completion(self, request: Request, meter: Meter) -> Response:
        body = parse_completion(await _json_body(request))
        self._check_model(body.model)
        prepared = await self._service.preparer.completion(
            body, request_id=request.scope[REQUEST_ID], owner=request.scope[OWNER]
        )
        generation = self._generate(prepared, body, meter)
        head = self._head("cmpl-")
        logprobs = self._logprobs if body.options.top_logprobs is not None else None
        echoes = tuple(choice.echo for choice in prepared)
        if body.delivery.stream:
            return self._stream(head, generation, CompletionChunks(logprobs, echoes), body, meter)
        texts = await self._collect(request, generation, meter)
        return json_response(
            {
                **head.head("text_completion"),
                "choices": [
                    _completion_choice(index, echoes[index], text, logprobs)
                    for index, text in enumerate(texts)
                ],
                "usage": usage_reply(generation.usage),
            }
        )

    def _generate(
        self,
        prepared: tuple[PreparedChoice, ...],
        body: ChatRequest | CompletionRequest,
        meter: Meter,
    ) -> Generation:
        files = self._service.files
        tools = body.tools if isinstance(body, ChatRequest) else None
        choices = [
            Choice(
                item,
                files,
                body.options.stop,
                None if tools is None else OutputParser(in_thought=item.in_thought, tools=tools),
            )
            for item in prepared
        ]
        generation = Generation(
            choices,
            self._scheduler.submit,
            counts_reasoning=tools is not None and files.think_ids is not None,
        )
        meter.accepted(generation.prompt_tokens)
        return generation

    def _stream(
        self,
        head: ReplyHead,
        generation: Generation,
        chunks: ChunkWriter,
        body: ChatRequest | CompletionRequest,
        meter: Meter,
    ) -> Response:
        config = self._service.config
        return FrameResponse(
            FrameStream(head, generation, chunks, body.delivery, meter),
            generation,
            keepalive_s=config.keepalive_s,
            send_timeout_s=config.send_timeout_s,
        )

    async def _collect(
        self, request: Request, generation: Generation, meter: Meter
    ) -> list[ChoiceText]:
        """The whole answer; a client that leaves ends it. Raises ClientDisconnect or what a sequence failed with."""
        texts = [ChoiceText() for _ in generation.choices]

        async def collect() -> None:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    meter.delivered(delta.num_tokens)
                    texts[delta.index].add(delta)

        try:
            await _unless_disconnected(request, collect)
        finally:
            generation.close()
        meter.ended(generation.outcome)
        return texts

    def _meter(self, endpoint: str) -> Meter:
        return Meter(self._service.metrics, endpoint, time.monotonic)

    def _head(self, prefix: str) -> ReplyHead:
        return ReplyHead(
            id=new_id(prefix), model=self._service.model, fingerprint=self._service.fingerprint
        )

    def _check_model(self, model: str) -> None:
        if model not in (self._service.model, DEFAULT_ALIAS):
            raise ModelNotFound(model, served=self._service.model)

    def _model_card(self) -> JsonReply:
        return {
            "id": self._service.model,
            "object": "model",
            "created": self._service.created,
            "owned_by": "stratagate",
            "max_model_len": self._scheduler.info.max_context,
        }


async def _json_body(request: Request) -> bytes:
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(content_type)
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


def _chat_choice(index: int, text: ChoiceText, logprobs: LogprobWriter | None) -> JsonReply:
    return {
        "index": index,
        "message": text.message(),
        "logprobs": None if logprobs is None else logprobs.chat(text.tokens),
        "finish_reason": text.finish_name,
    }


def _completion_choice(
    index: int, echo: str, text: ChoiceText, logprobs: LogprobWriter | None
) -> JsonReply:
    return {
        "index": index,
        "text": echo + "".join(text.content),
        "logprobs": None if logprobs is None else logprobs.completion(text.tokens),
        "finish_reason": text.finish_name,
    }
