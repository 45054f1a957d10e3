"""What a sequence may say next: the end of its thought, and its grammar, as a limit on each row, drafts included.

A limit depends on the ids before its row alone, never on which drafts were tried. Compiles grammars with llguidance,
imported when the first one comes; no torch, so that the gateway can check with the same code before it queues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import orjson

from engine.interface import Grammar, GrammarKind, SamplingParams, Thought

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MAX_GRAMMAR_BYTES = 2**20
"""Of one grammar's text; what clients write is held to less."""
_TRIALS = 3
"""How often a grammar begins before it is taken: when it is proved and in the engine, and once more."""
_CACHED = 32
"""Compiled grammars that are kept for the next request with the same one."""
_LIMITS = {
    "max_grammar_size": 50_000,
    "max_lexer_states": 20_000,
    "step_max_items": 20_000,
    "verbose_errors": False,
}
"""Compiling takes some tens of milliseconds under these but for odd texts, a row's mask a few."""
_JSON_SPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line: a weak model that may indent may go on indenting."""
JSON_OPTIONS_KEY = "x-guidance"
"""Where a schema carries options of its compilation."""

_NO_WAY = "NoExtensionBias"
"""How the library begins to say that no id can come next."""


class GrammarError(Exception):
    """A grammar that does not compile, is too large, or can never be matched."""


class GrammarCompiler:
    """Grammars of one vocabulary. Not thread-safe."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """directory: a checkpoint with tokenizer.json; it is read when the first grammar comes."""
        self.vocab_size = vocab_size
        self._directory = directory
        self._tokenizer: LLTokenizer | None = None
        self._end_ids: list[int] = []
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning. Raises GrammarError."""
        size = len(grammar.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar)
            self._compiled[grammar] = found
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarMatcher(found, self._end_ids, self.vocab_size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._loaded()
        limits = LLParserLimits(**cast("dict[str, Any]", _LIMITS))
        with _as_grammar_error():
            matcher = LLMatcher(tokenizer, _translated(grammar), limits=limits, log_level=0)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        # Copies share what the library has built so far: a bound that the first one only just kept stops the next.
        for _ in range(_TRIALS):
            trial = GrammarMatcher(matcher, self._end_ids, self.vocab_size)
            trial.allowed()
            if trial.error is not None:
                raise GrammarError(trial.error)
        return matcher

    def _loaded(self) -> LLTokenizer:
        found = self._tokenizer
        if found is None:
            from llguidance import LLTokenizer

            file = self._directory / "tokenizer.json"
            if not file.is_file():
                raise GrammarError("the model has no tokenizer.json")
            document = cast("dict[str, Any]", orjson.loads(file.read_bytes()))
            # An added token is never part of a text, whatever the file calls it: a grammar names it by id.
            for token in cast("list[dict[str, Any]]", document.get("added_tokens") or []):
                token["special"] = True
            with _as_grammar_error():
                found = LLTokenizer(
                    orjson.dumps(document).decode(),
                    n_vocab=self.vocab_size,
                    eos_token=_end_ids(self._directory),
                )
            self._end_ids = [i for i in found.eos_tokens if i < self.vocab_size]
            self._tokenizer = found
        return found


@contextmanager
def _as_grammar_error() -> Generator[None]:
    try:
        yield
    except (
        Exception
    ) as error:  # the library raises ValueError, and more for texts that it translates itself
        raise GrammarError(_first_line(str(error))) from error


def _end_ids(directory: Path) -> list[int] | None:
    """End marks of a checkpoint; None leaves the library to guess by name."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if not file.is_file():
            continue
        found = cast("dict[str, Any]", orjson.loads(file.read_bytes())).get("eos_token_id")
        ids = cast("list[object]", found if isinstance(found, list) else [found])
        numbers = [i for i in ids if isinstance(i, int)]
        if numbers:
            return numbers
    return None


def _translated(grammar: Grammar) -> str:
    """The library's own form. Raises whatever it raises."""
    from llguidance import LLMatcher, grammar_from

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides=cast("Any", _JSON_SPACE)
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.GRAMMAR:
            return grammar_from("grammar", grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def json_rule(schema: dict[str, object]) -> str:
    """A schema as the right side of a rule of a LARK grammar."""
    return "%json " + orjson.dumps({**schema, JSON_OPTIONS_KEY: _JSON_SPACE}).decode()


def regex_rule(pattern: str) -> str:
    """A regular expression as the right side of a terminal of a LARK grammar."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, '')}/"


def _first_line(text: str) -> str:
    """What a message of the library says, in a line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else "it cannot be used"
    reason = next((line for line in lines if line.startswith("error: ")), None)
    if line.endswith(":") and reason is not None:  # between them is a drawing of the place
        line = f"{line} {reason.removeprefix('error: ')}"
    return line if len(line) <= 300 else line[:297] + "..."


class GrammarMatcher:
    """Where a text stands in its grammar; end marks are not part of it."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int], vocab_size: int) -> None:
        """matcher: at the beginning; it is not changed."""
        self._fresh = matcher
        self._matcher = matcher.deep_copy()
        self._end_ids = list(end_ids)
        self._vocab_size = vocab_size
        self._ids: list[int] = []
        self.error: str | None = None
        """Why it can go on no more: it met a limit of complexity, or a place from where no text leads to an end."""

    @property
    def is_accepting(self) -> bool:
        """The text may end here."""
        return self._matcher.is_accepting()

    def allowed(self) -> NDArray[np.bool_]:
        """Ids that may come next, bool [vocab]; none when the text can only end here, or after an error."""
        bits = np.zeros(self._vocab_size, dtype=np.bool_)
        if self.error is not None:
            return bits
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        unpacked = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
        bits[: len(unpacked)] = unpacked
        bits[self._end_ids] = False
        text = self._matcher.get_error() if self._matcher.is_error() else ""
        if text and not text.startswith(_NO_WAY):
            self.error = _first_line(text)
        elif text or (not bits.any() and not self.is_accepting):
            self.error = "no text leads from here to the grammar's end"
        if self.error is not None:
            bits[:] = False
        return bits

    def advance(self, token_id: int) -> None:
        """Take an id that is allowed."""
        self._ids.append(token_id)
        if self.error is None and not self._matcher.consume_token(token_id):
            self.error = _first_line(self._matcher.get_error())

    def rollback(self, num_ids: int) -> None:
        """Forget the last ids, and what went wrong with them."""
        if num_ids == 0:
            return
        del self._ids[-num_ids:]
        if self.error is not None or not self._matcher.rollback(num_ids):
            # A matcher never leaves its error.
            self.error = None
            self._matcher = self._fresh.deep_copy()
            if not self._matcher.consume_tokens(self._ids):
                self.error = _first_line(self._matcher.get_error())


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimit:
    """Which ids a row may pick."""

    allowed: NDArray[np.bool_] | None = None
    """bool [vocab]; None: every id."""
    banned: tuple[int, ...] = ()
    overrules_min_tokens: bool = False
    """A stop id may come although too few tokens are out: nothing else can."""
    error: str | None = None
    """Nothing can: whoever uses this row's pick must give the sequence up."""


class _Phase(Enum):
    START = auto()
    """Nothing is out: a thought may open."""
    THOUGHT = auto()
    CLOSING = auto()
    """Ids are dictated."""
    ANSWER = auto()
    ENDED = auto()
    """A stop id is out."""


@dataclass(frozen=True, slots=True)
class _Place:
    """phase; count: ids of the thought so far, or of the closing ids."""

    phase: _Phase
    count: int = 0
    is_fed: bool = False
    """The id that led here went to the matcher."""


class Constraint:
    """Limits of one sequence's rows, by the ids of its output."""

    def __init__(
        self, params: SamplingParams, matcher: GrammarMatcher | None, vocab_size: int
    ) -> None:
        self._stop_ids = frozenset(params.stop_token_ids)
        self._thought = params.thought
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._drafts: list[int] = []
        """Ids behind the committed ones that have been taken for trial."""
        self._places = [self._settled(self._first_place(params.thought))]
        """Behind the committed ids, and behind each of the drafts."""
        self._limits: dict[int, RowLimit | None] = {}
        """Known limits, by how many of the drafts precede the row."""

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether any row can be limited."""
        has_budget = params.thought is not None and params.thought.budget is not None
        return params.grammar is not None or has_budget

    def limit_after(self, drafts: Sequence[int]) -> RowLimit | None:
        """The limit of the row behind the committed ids and these drafts."""
        shared, count = self._num_shared(drafts), len(drafts)
        if shared < count or count not in self._limits:
            self._move_to(drafts, shared)
            self._limits[count] = self._limit(self._places[-1])
        return self._limits[count]

    def commit(self, ids: Sequence[int]) -> None:
        """These ids are output."""
        self._move_to(ids, self._num_shared(ids))
        self._drafts.clear()
        self._limits.clear()
        del self._places[:-1]

    def _num_shared(self, ids: Sequence[int]) -> int:
        shared = 0
        for mine, other in zip(self._drafts, ids, strict=False):
            if mine != other:
                break
            shared += 1
        return shared

    def _move_to(self, ids: Sequence[int], shared: int) -> None:
        num_fed = sum(place.is_fed for place in self._places[shared + 1 :])
        if self._matcher is not None:
            self._matcher.rollback(num_fed)
        del self._places[shared + 1 :]
        del self._drafts[shared:]
        self._limits = {n: limit for n, limit in self._limits.items() if n <= shared}
        for token_id in ids[shared:]:
            self._places.append(self._settled(self._step(self._places[-1], token_id)))
            self._drafts.append(token_id)

    def _first_place(self, thought: Thought | None) -> _Place:
        if thought is None:
            return _Place(_Phase.ANSWER)
        return _Place(_Phase.THOUGHT if thought.is_open else _Phase.START)

    def _settled(self, place: _Place) -> _Place:
        """A thought whose budget is spent is being closed; one that is closed is over."""
        thought = self._thought
        if thought is None:
            return place
        if place.phase is _Phase.THOUGHT and thought.budget is not None:
            if place.count >= thought.budget:
                return _Place(_Phase.CLOSING)
        elif place.phase is _Phase.CLOSING and place.count == len(thought.closing_ids):
            return _Place(_Phase.ANSWER)
        return place

    def _step(self, place: _Place, token_id: int) -> _Place:
        thought = self._thought
        match place.phase:
            case _Phase.START:
                if thought is not None and token_id == thought.open_id:
                    return _Place(_Phase.THOUGHT)
                return self._answer(token_id)
            case _Phase.THOUGHT:
                assert thought is not None
                if token_id == thought.close_id:
                    return self._behind_thought(thought)
                if token_id in self._stop_ids:
                    return _Place(_Phase.ENDED)
                if token_id in thought.leaving_ids:
                    return _Place(_Phase.ANSWER)
                return _Place(_Phase.THOUGHT, place.count + 1)
            case _Phase.CLOSING:
                return _Place(_Phase.CLOSING, place.count + 1)
            case _Phase.ANSWER:
                return self._answer(token_id)
            case _Phase.ENDED:
                return place

    def _behind_thought(self, thought: Thought) -> _Place:
        """With a grammar, what the format has between thought and answer is dictated: no grammar knows it."""
        if self._matcher is None:
            return _Place(_Phase.ANSWER)
        return _Place(_Phase.CLOSING, thought.closing_ids.index(thought.close_id) + 1)

    def _answer(self, token_id: int) -> _Place:
        if token_id in self._stop_ids:
            return _Place(_Phase.ENDED)
        if self._matcher is None:
            return _Place(_Phase.ANSWER)
        self._matcher.advance(token_id)
        return _Place(_Phase.ANSWER, is_fed=True)

    def _limit(self, place: _Place) -> RowLimit | None:
        thought = self._thought
        match place.phase:
            case _Phase.ENDED:
                return None
            case _Phase.THOUGHT:
                assert thought is not None
                # A text that ended inside its thought would not match.
                banned = (*self._stop_ids, *thought.leaving_ids) if self._matcher else ()
                kept = tuple(i for i in banned if i != thought.close_id)
                return RowLimit(banned=kept) if kept else None
            case _Phase.CLOSING:
                assert thought is not None
                allowed = np.zeros(self._vocab_size, dtype=np.bool_)
                allowed[thought.closing_ids[place.count]] = True
                return RowLimit(allowed=allowed, overrules_min_tokens=True)
            case _Phase.START | _Phase.ANSWER:
                return self._answer_limit(place)

    def _answer_limit(self, place: _Place) -> RowLimit | None:
        matcher = self._matcher
        if matcher is None:
            return None
        allowed = matcher.allowed()
        if matcher.error is not None:
            return RowLimit(error=matcher.error)
        is_over = not allowed.any()
        if is_over and not self._stop_ids:
            return RowLimit(error="it is complete, and there is no stop id to say so")
        if matcher.is_accepting:
            allowed[list(self._stop_ids)] = True
        thought = self._thought
        if place.phase is _Phase.START and thought is not None and thought.open_id is not None:
            allowed[thought.open_id] = True
        return RowLimit(allowed=allowed, overrules_min_tokens=is_over)
