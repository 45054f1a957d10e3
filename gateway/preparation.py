"""Checked requests to GenerateRequests: render, tokenize, fill in the model's defaults, prove the length."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from gateway.errors import InvalidRequest
from gateway.structured import Structurer
from gateway.template import RenderedPrompt
from scheduler.errors import RequestTooLong
from scheduler.messages import GenerateRequest, SamplingParams
from scheduler.words import counted

if TYPE_CHECKING:
    from gateway.model_files import ModelFiles
    from gateway.structured import Limits
    from gateway.wire import ChatRequest, CompletionRequest, GenerationOptions
    from scheduler.messages import EngineInfo

_Number = TypeVar("_Number", int, float)

_INLINE_CHARS = 4096
"""Shorter prompts are rendered on the event loop: they take less than handing them to a thread."""
_MOST_COMPOSED_CHARS = 4
"""Characters that Unicode normalisation may make one of before a text is tokenised."""
_MAX_THREADS = 2
_GREEDY_BELOW = 1e-5
"""A temperature under this cannot be divided by."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Distance between the seeds of one request's choices; choice 0 has the seed that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChoice:
    """One sequence to be generated."""

    index: int
    request: GenerateRequest
    in_thought: bool
    echo: str
    """Text that precedes the output."""


class Preparer:
    """Turns requests into sequences for one loaded model."""

    def __init__(self, files: ModelFiles, info: EngineInfo) -> None:
        self._files = files
        self._info = info
        self._structurer = Structurer(files, info.vocab_size)
        self._limiter = anyio.CapacityLimiter(_MAX_THREADS)

    async def chat(
        self, request: ChatRequest, *, request_id: str, owner: str
    ) -> tuple[PreparedChoice, ...]:
        """One sequence per choice. Raises InvalidRequest.

        Cancellation waits for a tokenization that has begun.
        """
        self._refuse_hopeless(_num_chars(request), "messages")
        self._refuse_many(len(request.messages), "messages", "messages")
        prompt = await self.rendered(request)
        limits = await self._structurer.chat_limits(request, prompt)
        sampling = self._sampling(request.options, limits)
        return self._choices(
            request.options, sampling, [(prompt, "")], request_id, owner, "messages"
        )

    async def rendered(self, request: ChatRequest) -> RenderedPrompt:
        """The prompt alone, however long. Raises InvalidRequest. Cancelled like `chat`."""
        if _is_short(request):
            return self._render(request)
        return await anyio.to_thread.run_sync(self._render, request, limiter=self._limiter)

    async def encoded(self, text: str, *, parse_special: bool) -> tuple[int, ...]:
        """Ids of a raw text. Cancelled like `chat`."""
        encode = partial(self._files.encoder.encode_plain, text, parse_special=parse_special)
        return await anyio.to_thread.run_sync(encode, limiter=self._limiter)

    async def decoded(self, ids: tuple[int, ...]) -> str:
        """Text of ids, hidden tokens left out. Raises InvalidRequest. Cancelled like `chat`."""
        self._check_ids("tokens", ids)
        return await anyio.to_thread.run_sync(self._files.decode, ids, limiter=self._limiter)

    async def completion(
        self, request: CompletionRequest, *, request_id: str, owner: str
    ) -> tuple[PreparedChoice, ...]:
        """One sequence per prompt and choice. Raises InvalidRequest.

        Cancellation waits for a tokenization that has begun.
        """
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self._refuse_hopeless(len(prompt), "prompt")
            else:
                self._refuse_many(len(prompt), "tokens", "prompt")
        # An id costs what a character does: it is looked up, and with `echo` decoded.
        if sum(map(len, request.prompts)) <= _INLINE_CHARS:
            prompts = self._encode(request)
        else:
            prompts = await anyio.to_thread.run_sync(self._encode, request, limiter=self._limiter)
        sampling = self._sampling(
            request.options, await self._structurer.text_limits(request.options)
        )
        return self._choices(request.options, sampling, prompts, request_id, owner, "prompt")

    def _refuse_hopeless(self, num_chars: int, param: str) -> None:
        """Refuse a text that no tokenisation makes fit, before it costs one."""
        per_token = self._files.tokenizer.most_chars_per_token * _MOST_COMPOSED_CHARS
        least = -(-num_chars // per_token)
        if least <= self._info.max_context:
            return
        raise InvalidRequest(
            f"{param} has {num_chars} characters, which are at least {least} tokens, "
            f"but the context holds {self._info.max_context}",
            param=param,
            code="context_length_exceeded",
        )

    def _refuse_many(self, count: int, what: str, param: str) -> None:
        """Refuse more of what takes a token each than the context holds, before it costs anything."""
        if count > self._info.max_context:
            raise InvalidRequest(
                f"{param} has {count} {what}, but the context holds {self._info.max_context} tokens",
                param=param,
                code="context_length_exceeded",
            )

    def _render(self, request: ChatRequest) -> RenderedPrompt:
        return self._files.template.render(
            request.messages,
            request.template_kwargs,
            tools=request.tools,
            continue_final=request.continue_final,
        )

    def _encode(self, request: CompletionRequest) -> list[tuple[RenderedPrompt, str]]:
        encoded: list[tuple[RenderedPrompt, str]] = []
        for prompt in request.prompts:
            encoded.append(self._encode_one(request, prompt))
            # The first that does not fit ends it: the others are not worth their tokenisation.
            self._max_tokens(request.options, encoded[-1][0], "prompt")
        return encoded

    def _encode_one(
        self, request: CompletionRequest, prompt: str | tuple[int, ...]
    ) -> tuple[RenderedPrompt, str]:
        if isinstance(prompt, str):
            encoder = self._files.encoder
            ids = encoder.encode_plain(prompt, parse_special=request.parse_special)
            text = prompt if request.echo else ""
        else:
            ids = prompt
            self._check_ids("prompt", ids)
            text = self._files.decode(ids) if request.echo else ""
        return RenderedPrompt(token_ids=ids, in_thought=False), text

    def _choices(
        self,
        options: GenerationOptions,
        sampling: SamplingParams,
        prompts: list[tuple[RenderedPrompt, str]],
        request_id: str,
        owner: str,
        param: str,
    ) -> tuple[PreparedChoice, ...]:
        seed = secrets.randbits(64) if options.seed is None else options.seed % 2**64
        result: list[PreparedChoice] = []
        for prompt, echo in prompts:
            max_tokens = self._max_tokens(options, prompt, param)
            for number in range(options.num_choices):
                index = len(result)
                result.append(
                    PreparedChoice(
                        index=index,
                        request=GenerateRequest(
                            request_id=request_id if index == 0 else f"{request_id}-{index}",
                            prompt_ids=prompt.token_ids,
                            sampling=replace(sampling, seed=choice_seed(seed, number)),
                            max_tokens=max_tokens,
                            owner=owner,
                            conversation_key=options.conversation_key,
                            max_draft=options.spec,
                            spec_min_p=options.spec_min_p,
                            priority=-options.priority,
                            deadline_s=options.deadline_s,
                        ),
                        in_thought=prompt.in_thought,
                        echo=echo,
                    )
                )
        return tuple(result)

    def _max_tokens(self, options: GenerationOptions, prompt: RenderedPrompt, param: str) -> int:
        num_prompt = len(prompt.token_ids)
        if num_prompt == 0:
            raise InvalidRequest(f"{param} has no tokens", param=param)
        room = self._info.max_context - num_prompt
        wanted = room if options.max_tokens is None else options.max_tokens
        if room < 1 or wanted > room:
            error = RequestTooLong(
                prompt_tokens=num_prompt,
                max_tokens=max(wanted, 1),
                max_context=self._info.max_context,
            )
            raise InvalidRequest(
                str(error),
                param=param if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        if options.min_tokens > wanted:
            raise InvalidRequest(
                f"min_tokens is {options.min_tokens} but only {counted(wanted, 'token')} can follow",
                param="min_tokens",
            )
        return wanted

    def _sampling(self, options: GenerationOptions, limits: Limits) -> SamplingParams:
        defaults = self._files.defaults
        temperature = _first(options.temperature, defaults.temperature)
        self._check_ids("stop_token_ids", options.stop_token_ids)
        self._check_ids("logit_bias", tuple(token_id for token_id, _ in options.logit_bias))
        eos_ids = () if options.ignore_eos else defaults.stop_token_ids
        return SamplingParams(
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_k=_first(options.top_k, defaults.top_k),
            top_p=_first(options.top_p, defaults.top_p),
            min_p=_first(options.min_p, defaults.min_p),
            presence_penalty=_first(options.presence_penalty, 0.0),
            frequency_penalty=_first(options.frequency_penalty, 0.0),
            repetition_penalty=_first(options.repetition_penalty, defaults.repetition_penalty),
            logit_bias=options.logit_bias,
            stop_token_ids=tuple(dict.fromkeys((*eos_ids, *options.stop_token_ids))),
            min_tokens=options.min_tokens,
            top_logprobs=options.top_logprobs,
            grammar=limits.grammar,
            thought=limits.thought,
        )

    def _check_ids(self, param: str, ids: tuple[int, ...]) -> None:
        largest = max(ids, default=0)
        if largest >= self._info.vocab_size:
            limit = self._info.vocab_size - 1
            raise InvalidRequest(
                f"{param} has token {largest}; ids go from 0 to {limit}", param=param
            )


def choice_seed(seed: int, number: int) -> int:
    """The seed of a request's choice: asked for by itself it gives the same answer."""
    return (seed + number * _SEED_STEP) % 2**64


def _first(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value


def _is_short(request: ChatRequest) -> bool:
    """Its prompt may be rendered on the event loop. Tools and calls have texts of any length, and are not counted."""
    if request.tools or any(message.tool_calls for message in request.messages):
        return False
    return _num_chars(request) + 64 * len(request.messages) <= _INLINE_CHARS


def _num_chars(request: ChatRequest) -> int:
    """Characters of the messages' texts."""
    return sum(
        len(message.content) + len(message.reasoning_content or "") for message in request.messages
    )
