"""Other APIs over the chat endpoint's generation path: tokenizing, Anthropic's messages, OpenAI's responses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.routing import Route

from gateway.answering import DEFAULT_ALIAS, Answering
from gateway.messages_reply import MessageWriter, ping
from gateway.messages_wire import parse_count, parse_message
from gateway.replies import LogprobWriter
from gateway.responses import json_response
from gateway.responses_api_reply import ResponseWriter
from gateway.responses_api_wire import parse_response
from gateway.token_wire import parse_detokenize, parse_tokenize, tokenize_reply

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from gateway.metrics import Meter
    from gateway.routes import Service


class OtherApis:
    """Methods are Starlette endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._answering = Answering(service)
        self._logprobs = LogprobWriter(service.files.tokenizer)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages"""
        return await self._answering.metered(request, "messages", self._messages)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses"""
        return await self._answering.metered(request, "responses", self._responses)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        body = await self._answering.parsed(request, parse_count)
        self._answering.check_model(body.model)
        prompt = await self._service.preparer.rendered(body)
        return json_response({"input_tokens": len(prompt.token_ids)})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        body = await self._answering.parsed(
            request, partial(parse_tokenize, default_model=DEFAULT_ALIAS)
        )
        self._answering.check_model(body.model)
        preparer = self._service.preparer
        if isinstance(body.prompt, str):
            ids = await preparer.encoded(body.prompt, parse_special=body.parse_special)
        else:
            ids = (await preparer.rendered(body.prompt)).token_ids
        tokenizer = self._service.files.tokenizer if body.wants_strings else None
        return json_response(
            tokenize_reply(ids, self._service.scheduler.info.max_context, tokenizer)
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        body = await self._answering.parsed(
            request, partial(parse_detokenize, default_model=DEFAULT_ALIAS)
        )
        self._answering.check_model(body.model)
        return json_response({"prompt": await self._service.preparer.decoded(body.token_ids)})

    async def _messages(self, request: Request, meter: Meter) -> Response:
        body = await self._answering.parsed(request, parse_message)
        generation = await self._answering.start_chat(request, body, meter)
        writer = MessageWriter(self._service.model, generation)
        if body.delivery.stream:
            return self._answering.stream(generation, writer, meter, ping)
        await self._answering.collect(request, generation, meter, writer.add)
        return json_response(writer.whole())

    async def _responses(self, request: Request, meter: Meter) -> Response:
        body = await self._answering.parsed(request, parse_response)
        generation = await self._answering.start_chat(request, body.chat, meter)
        logprobs = self._logprobs if body.chat.options.top_logprobs is not None else None
        writer = ResponseWriter(self._service.model, body.echo, generation, logprobs)
        if body.chat.delivery.stream:
            return self._answering.stream(generation, writer, meter)
        await self._answering.collect(request, generation, meter, writer.add)
        return json_response(writer.whole())
