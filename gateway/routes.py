"""The endpoints: parse, call, respond."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from gateway.answering import Answering
from gateway.errors import reply_for
from gateway.metrics import CONTENT_TYPE
from gateway.middleware import OWNER, REQUEST_ID
from gateway.replies import ChoiceText, LogprobWriter, ReplyHead, new_id, usage_reply
from gateway.responses import json_response
from gateway.stream import ChatChunks, ChunkFrames, CompletionChunks
from gateway.wire import parse_chat, parse_completion

if TYPE_CHECKING:
    from starlette.requests import Request

    from gateway.config import GatewayConfig
    from gateway.generation import ChoiceDelta, Generation
    from gateway.metrics import Meter, Metrics
    from gateway.model_files import ModelFiles
    from gateway.preparation import Preparer
    from gateway.replies import JsonReply
    from gateway.tracing import RequestTracer
    from scheduler.service import Scheduler


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
    tracer: RequestTracer | None = None

    @property
    def fingerprint(self) -> str:
        """Changes when the same seed may give another text."""
        info = self.scheduler.info
        facts = f"{self.version}|{info.model_name}|{info.device}|{info.dtype}|{info.kv_dtype}|{info.kernels}"
        return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


class Endpoints:
    """Methods are Starlette endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._scheduler = service.scheduler
        self._answering = Answering(service)
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
        return await self._answering.metered(request, "chat", self._chat)

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._answering.metered(request, "completions", self._completion)

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        del request
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}"""
        self._answering.check_model(request.path_params["model"])
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
        refusal = self._scheduler.refusal()
        state = str(self._scheduler.engine_state)
        if refusal is None:
            return json_response({"ready": True, "engine": state})
        headers = {"retry-after": str(reply_for(refusal).retry_after_s)}
        return json_response({"ready": False, "engine": state}, 503, headers)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        del request
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _chat(self, request: Request, meter: Meter) -> Response:
        body = await self._answering.parsed(request, parse_chat)
        generation = await self._answering.start_chat(request, body, meter)
        head = self._head("chatcmpl-")
        logprobs = self._logprobs if body.options.top_logprobs is not None else None
        if body.delivery.stream:
            writer = ChunkFrames(head, generation, ChatChunks(logprobs), body.delivery)
            return self._answering.stream(generation, writer, meter)
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
        body = await self._answering.parsed(request, parse_completion)
        self._answering.check_model(body.model)
        prepared = await self._service.preparer.completion(
            body, request_id=request.scope[REQUEST_ID], owner=request.scope[OWNER]
        )
        generation = self._answering.start(request, prepared, body.options, None, meter)
        head = self._head("cmpl-")
        logprobs = self._logprobs if body.options.top_logprobs is not None else None
        echoes = tuple(choice.echo for choice in prepared)
        if body.delivery.stream:
            chunks = CompletionChunks(logprobs, echoes)
            writer = ChunkFrames(head, generation, chunks, body.delivery)
            return self._answering.stream(generation, writer, meter)
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

    async def _collect(
        self, request: Request, generation: Generation, meter: Meter
    ) -> list[ChoiceText]:
        """The whole answer. Raises what `Answering.collect` does."""
        texts = [ChoiceText() for _ in generation.choices]

        def add(delta: ChoiceDelta) -> None:
            texts[delta.index].add(delta)

        await self._answering.collect(request, generation, meter, add)
        return texts

    def _head(self, prefix: str) -> ReplyHead:
        return ReplyHead(
            id=new_id(prefix), model=self._service.model, fingerprint=self._service.fingerprint
        )

    def _model_card(self) -> JsonReply:
        return {
            "id": self._service.model,
            "object": "model",
            "created": self._service.created,
            "owned_by": "stratagate",
            "max_model_len": self._scheduler.info.max_context,
        }


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
