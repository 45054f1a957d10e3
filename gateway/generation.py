"""One request's sequences: token events of its handles to deltas of its choices, and what they cost.

Owns the text state. Knows neither JSON nor SSE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from gateway.detokenize import Detokenizer, OutputToken, TextDelta
from gateway.errors import InvalidRequest
from gateway.output_parser import ParsedDelta
from gateway.tools import CallDelta
from scheduler.errors import GrammarFailed
from scheduler.messages import Finished, FinishReason, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gateway.content_tokens import ContentSpans
    from gateway.model_files import ModelFiles
    from gateway.output_parser import OutputParser
    from gateway.preparation import PreparedChoice
    from scheduler.handle import RequestHandle
    from scheduler.messages import GenerateRequest, TokenEvent
    from scheduler.messages import Usage as SequenceUsage


FAILED = "failed"
"""Outcome of a sequence that could not be finished."""


class ChoiceDelta(Struct, frozen=True, kw_only=True, gc=False):
    """News of one choice."""

    index: int
    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[OutputToken, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the last delta of the choice, and only there."""
    num_tokens: int = 0
    """How many more tokens the choice has cost."""

    has_calls: bool = False
    """The choice has called a tool, now or before."""

    @property
    def has_output(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.tokens)

    @property
    def finish_name(self) -> str | None:
        """OpenAI's word for how the choice ended."""
        if self.finish_reason is FinishReason.STOP and self.has_calls:
            return "tool_calls"
        return self.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """What a request cost so far, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens up to the end of each choice: a stop id counts, as does the token that completed a stop string."""
    cached_tokens: int
    reasoning_tokens: int | None
    """None when the vocabulary has no thought marks."""
    accepted_tokens: int
    rejected_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTimes:
    """Where the time of one sequence went, on the scheduler's clock; None: it did not come so far."""

    index: int
    submitted_s: float
    started_s: float | None
    """It got a slot."""
    first_token_s: float | None
    ended_s: float
    usage: SequenceUsage
    outcome: str
    """How it ended: a finish reason, `cancelled` or FAILED."""


class Choice:
    """One sequence and the state of its text."""

    def __init__(
        self,
        prepared: PreparedChoice,
        files: ModelFiles,
        stop: tuple[str, ...],
        parser: OutputParser | None,
    ) -> None:
        """parser: tells thought, content and calls apart; without one all output is content."""
        self.prepared = prepared
        self.index = prepared.index
        self.finish_reason: FinishReason | None = None
        self.engine_usage: SequenceUsage | None = None
        """None until it ended; with a stop string it may count a window more than the text has."""
        self.reasoning_tokens = 0
        self._stop_ids = frozenset(prepared.request.sampling.stop_token_ids)
        self._detokenizer = Detokenizer(files.tokenizer, stop)
        self._num_stop_ids = 0
        self._parser = parser
        self._think_ids = None if parser is None else files.think_ids
        self._think_open_id = None if self._think_ids is None else self._think_ids[0]
        self._in_thought = prepared.in_thought
        self._has_calls = False
        self._is_plain = self._shows_all()
        """Until an id ends it or opens a thought, text is content as it comes."""

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def content_spans(self) -> ContentSpans | None:
        """Which characters of the output became content; None unless log-probabilities were asked for."""
        return None if self._parser is None else self._parser.spans

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return self._detokenizer.stop_string

    @property
    def completion_tokens(self) -> int:
        return self._detokenizer.num_tokens + self._num_stop_ids

    def accept(self, event: Tokens) -> ChoiceDelta:
        """New tokens; the delta ends the choice when they complete a stop string."""
        ids = event.token_ids
        if self._is_plain and ids[-1] not in self._stop_ids and self._think_open_id not in ids:
            text = self._detokenizer.plain_text(ids)
            return ChoiceDelta(index=self.index, content=text, num_tokens=len(ids))
        # The stop id is counted and never shown, whether or not it has text.
        has_stop_id = ids[-1] in self._stop_ids
        shown = ids[:-1] if has_stop_id else ids
        detokenizer = self._detokenizer
        before = detokenizer.num_tokens
        delta = detokenizer.push(shown, event.logprobs)
        num_tokens = detokenizer.num_tokens - before
        think_ids = self._think_ids
        if think_ids is not None and (self._in_thought or think_ids[0] in shown):
            self._count_reasoning(shown[:num_tokens], think_ids)
        if detokenizer.stopped:
            self.finish_reason = FinishReason.STOP
        elif has_stop_id:
            self._num_stop_ids += 1
            num_tokens += 1
        if self._parser is None:
            news = ChoiceDelta(
                index=self.index,
                content=delta.text,
                tokens=delta.tokens,
                finish_reason=self.finish_reason,
                num_tokens=num_tokens,
            )
        else:
            news = self._parsed(self._parser, delta, num_tokens)
        self._is_plain = self._shows_all()
        return news

    def _shows_all(self) -> bool:
        """Whether there is nothing left to be told apart, found or counted in the text."""
        return (
            self._parser is None
            and not (self._in_thought and self._think_ids is not None)
            and self._detokenizer.is_plain
            and self.prepared.request.sampling.top_logprobs is None
        )

    def finish(self, event: Finished) -> ChoiceDelta:
        """The last delta of a sequence that ended by itself: what was held back."""
        self.engine_usage = event.usage
        delta = self._detokenizer.finish()
        # A broken character at the very end may still complete a stop string.
        self.finish_reason = FinishReason.STOP if self._detokenizer.stopped else event.reason
        reason = self.finish_reason
        if self._parser is not None:
            return self._parsed(self._parser, delta, 0)
        return ChoiceDelta(
            index=self.index, content=delta.text, tokens=delta.tokens, finish_reason=reason
        )

    def _parsed(self, parser: OutputParser, new: TextDelta, num_tokens: int) -> ChoiceDelta:
        """The parts of new text; when the choice has ended, all that the parser holds as well."""
        reason = self.finish_reason
        parsed = parser.push(new.text)
        if reason is not None:
            parsed = _joined(parsed, parser.finish())
        elif parser.is_through:
            self._parser = None  # all that still comes is content
        self._has_calls = self._has_calls or bool(parsed.calls)
        return ChoiceDelta(
            index=self.index,
            reasoning=parsed.reasoning,
            content=parsed.content,
            calls=parsed.calls,
            has_calls=self._has_calls,
            tokens=new.tokens,
            finish_reason=reason,
            num_tokens=num_tokens,
        )

    def _count_reasoning(self, token_ids: Sequence[int], think_ids: tuple[int, int]) -> None:
        """Tokens of the thought, its marks included."""
        opening, closing = think_ids
        for token_id in token_ids:
            if token_id == opening and self.reasoning_tokens == 0:
                self._in_thought = True
            self.reasoning_tokens += self._in_thought
            if token_id == closing:
                self._in_thought = False


def _joined(first: ParsedDelta, second: ParsedDelta) -> ParsedDelta:
    return ParsedDelta(
        reasoning=first.reasoning + second.reasoning,
        content=first.content + second.content,
        calls=first.calls + second.calls,
    )


class Generation:
    """All sequences of one request; `close` leaves none of them running."""

    def __init__(
        self,
        choices: Sequence[Choice],
        submit: Callable[[GenerateRequest, RequestHandle | None], RequestHandle],
        *,
        counts_reasoning: bool,
        grammar_param: str = "tools",
    ) -> None:
        """Submits every sequence, or none: raises what `submit` raises.

        grammar_param: the field of the request that a grammar comes from, if there is one.
        """
        self.choices = tuple(choices)
        self._grammar_param = grammar_param
        self._counts_reasoning = counts_reasoning
        self._handles: list[RequestHandle] = []
        self._on_delta: Callable[[ChoiceDelta], object] | None = None
        self._on_end: Callable[[Exception | None], object] | None = None
        self._is_over = False
        try:
            leaders: dict[int, RequestHandle] = {}
            for choice in self.choices:
                request = choice.prepared.request
                # Choices of one prompt have the same ids object: it is read once for all of them.
                handle = submit(request, leaders.get(id(request.prompt_ids)))
                leaders.setdefault(id(request.prompt_ids), handle)
                self._handles.append(handle)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what still runs; nobody is told of anything any more. Idempotent."""
        self._is_over = True
        for handle in self._handles:
            handle.cancel()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each distinct prompt once: choices of one prompt share it."""
        return sum(len(choice.prepared.request.prompt_ids) for choice in self._readers())

    def _readers(self) -> Iterable[Choice]:
        """The first choice of each distinct prompt, which reads it for the others."""
        first: dict[int, Choice] = {}
        for choice in self.choices:
            first.setdefault(id(choice.prepared.request.prompt_ids), choice)
        return first.values()

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def outcome(self) -> str:
        """How the first choice ended: stop or length."""
        return self.choices[0].finish_reason or "unfinished"

    @property
    def usage(self) -> RequestUsage:
        ended = [choice.engine_usage for choice in self.choices if choice.engine_usage is not None]
        accepted = sum(usage.accepted_tokens for usage in ended)
        reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        return RequestUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=sum(
                reader.engine_usage.cached_tokens
                for reader in self._readers()
                if reader.engine_usage is not None
            ),
            reasoning_tokens=reasoning if self._counts_reasoning else None,
            accepted_tokens=accepted,
            rejected_tokens=sum(usage.drafted_tokens for usage in ended) - accepted,
        )

    def times(self) -> Iterator[SequenceTimes]:
        """Of every sequence, when all of them are over."""
        for choice, handle in zip(self.choices, self._handles, strict=True):
            usage, ended_s = handle.usage, handle.ended_s
            assert usage is not None and ended_s is not None
            unfinished = "cancelled" if handle.cancelled else FAILED
            yield SequenceTimes(
                index=choice.index,
                submitted_s=handle.submitted_s,
                started_s=handle.started_s,
                first_token_s=handle.first_token_s,
                ended_s=ended_s,
                usage=usage,
                outcome=choice.finish_reason or unfinished,
            )

    def start(
        self,
        on_delta: Callable[[ChoiceDelta], object],
        on_end: Callable[[Exception | None], object],
    ) -> None:
        """Have the event loop give every delta, empty ones included, to `on_delta`, and at last call `on_end` once.

        With None when every choice has ended; with the error of the first sequence that fails, or of `on_delta`, and
        then nothing is left running.
        """
        self._on_delta, self._on_end = on_delta, on_end
        for choice, handle in zip(self.choices, self._handles, strict=True):
            handle.listen(partial(self._take, choice, handle))

    def _take(self, choice: Choice, handle: RequestHandle, event: TokenEvent) -> None:
        if self._is_over or choice.finish_reason is not None:
            return
        assert self._on_delta is not None
        try:
            if isinstance(event, Tokens):
                delta = choice.accept(event)
                if delta.finish_reason is not None:
                    handle.cancel()
                    choice.engine_usage = handle.usage
            elif isinstance(event, Finished):
                delta = choice.finish(event)
            else:
                raise self._told(event.error)
            self._on_delta(delta)
        except Exception as error:
            self._end(error)
            return
        if delta.finish_reason is not None and all(choice.ended for choice in self.choices):
            self._end(None)

    def _told(self, error: Exception) -> Exception:
        """The error in the words of the request."""
        if not isinstance(error, GrammarFailed):
            return error
        param = self._grammar_param
        return InvalidRequest(f"{param} cannot be used: {error}", param=param)

    def _end(self, error: Exception | None) -> None:
        self.close()
        assert self._on_end is not None
        self._on_end(error)
