"""A day at a server, in small: people and agents who mean well, some who leave, a few mistakes, and a canary.

The canary asks the same question greedily, again and again: whatever else the server does, the answer must not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from loadtest.agreement import CANARY
from loadtest.client import Outcome, RequestPlan
from loadtest.driver import chat_body
from loadtest.faults import COUNTED, fault_mix
from loadtest.workload import AGENT_TOOLS, Conversation, random_text

if TYPE_CHECKING:
    from random import Random

_MIX = {
    "chat": 30,
    "multi-turn": 15,
    "agent": 12,
    "document": 5,
    "impatient": 10,
    CANARY: 8,
    "fault": 10,
}
_CANARY_TOKENS = 32
_AGENT_PROMPT_WORDS = 400


def soak_mix(
    rng: Random, *, model: str, max_tokens: int, document_words: int, oversize_words: int
) -> Iterator[Conversation | RequestPlan]:
    """Endless. Conversations go on for some turns; all else is one request."""
    mix = _Mix(rng, model, max_tokens, document_words)
    faults = fault_mix(rng, model=model, max_tokens=max_tokens, oversize_words=oversize_words)
    kinds, weights = list(_MIX), list(_MIX.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        yield next(faults) if kind == "fault" else mix.one(kind)


class _Mix:
    """Draws conversations of each kind; agents share a system prompt, canaries everything."""

    def __init__(self, rng: Random, model: str, max_tokens: int, document_words: int) -> None:
        self._rng = rng
        self._model = model
        self._max_tokens = max_tokens
        self._document_words = document_words
        self._agent_prompt = random_text(rng, _AGENT_PROMPT_WORDS)
        question = [{"role": "user", "content": "What makes a good morning?"}]
        greedy = {**COUNTED, "temperature": 0}
        self._canary = RequestPlan(
            body=chat_body(model, question, _CANARY_TOKENS, greedy),
            kind=CANARY,
            max_tokens=_CANARY_TOKENS,
        )

    def one(self, kind: str) -> Conversation | RequestPlan:
        rng, words = self._rng, self._words
        chat = Conversation(
            turns=(words(3, 80),), kind=kind, max_tokens=rng.randint(1, self._max_tokens)
        )
        match kind:
            case "multi-turn":
                turns = tuple(words(3, 40) for _ in range(rng.randint(2, 5)))
                return replace(chat, turns=turns, pause_s=rng.uniform(0.1, 3.0))
            case "agent":
                turns = tuple(words(20, 100) for _ in range(rng.randint(2, 4)))
                return replace(chat, turns=turns, system=self._agent_prompt, tools=AGENT_TOOLS)
            case "document":
                text = words(self._document_words // 2, self._document_words)
                return replace(chat, turns=(f"{text}\n\nWhat is this about?",))
            case "impatient":
                return self._impatient(chat)
            case str() if kind == CANARY:
                return self._canary
            case _:
                return chat

    def _impatient(self, chat: Conversation) -> RequestPlan:
        messages = [{"role": "user", "content": chat.turns[0]}]
        return RequestPlan(
            body=chat_body(self._model, messages, self._max_tokens, COUNTED),
            kind=chat.kind,
            max_tokens=self._max_tokens,
            disconnect_after_chunks=self._rng.randint(0, 12),
            expected=(Outcome.DISCONNECTED, Outcome.OK),
        )

    def _words(self, least: int, most: int) -> str:
        return random_text(self._rng, self._rng.randint(least, most))
