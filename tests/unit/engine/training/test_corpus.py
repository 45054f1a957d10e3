from __future__ import annotations

import json
from typing import Any

import pytest

from engine.training.corpus import (
    Turn,
    clean_text,
    is_code,
    is_english,
    is_held_out,
    iter_records,
    join_pieces,
    keep_exchange,
    read_conversations,
    split_exchanges,
)

QUESTION = "Can you tell me how the garden was made and what is in it?"
ANSWER = (
    "Of course. The garden was made by the people of the town, and it has a pond in the middle."
)


def _record(record_id: str, *turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": record_id, "conversations": [{"from": f, "value": v} for f, v in turns]}


def test_reader_yields_every_whole_record_of_a_broken_off_file() -> None:
    records = [_record(f"chat{i}_0", ("human", QUESTION), ("gpt", ANSWER)) for i in range(3)]
    text = json.dumps(records, indent=1)
    whole = list(iter_records(text))
    assert whole == records
    for cut in range(len(text) - 30, len(text) - 3):
        assert list(iter_records(text[:cut])) == records[:2]


def test_pieces_of_one_chat_are_joined_where_they_meet() -> None:
    records = [
        _record("a_2", ("human", "three"), ("gpt", "four")),
        _record("a_0", ("human", "one"), ("gpt", "two")),
        _record("a_9", ("human", "later")),
    ]
    joined = [[turn.text for turn in turns] for _, turns in join_pieces(records)]
    assert joined == [["one", "two", "three", "four"], ["later"]]


def test_a_bad_exchange_cuts_the_conversation_in_two() -> None:
    good = [Turn("user", QUESTION), Turn("assistant", ANSWER)]
    bad = [Turn("user", QUESTION), Turn("assistant", "As an AI language model, I can not say.")]
    parts = list(split_exchanges("a", [*good, *bad, *good, *good]))
    assert [len(part.turns) for part in parts] == [2, 4]


def test_a_conversation_does_not_open_with_continue() -> None:
    turns = [Turn("user", "please continue"), Turn("assistant", ANSWER)]
    assert list(split_exchanges("a", turns)) == []


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("a &lt; b", "a < b"),
        ('<p class="x">Hello</p>', "Hello"),
        (r"snake\_case and 1\. item", "snake_case and 1. item"),
        ("“quoted” it’s", '"quoted" it\'s'),
        ("one\r\n\r\n\r\n\r\ntwo  \n", "one\n\ntwo"),
        ("zero\u200bwidth", "zerowidth"),
    ],
)
def test_page_artefacts_are_undone(dirty: str, clean: str) -> None:
    assert clean_text(dirty) == clean


@pytest.mark.parametrize(
    "answer",
    [
        "As an AI language model, I do not have feelings about the garden that you ask for.",
        "Le jardin est tres beau et les gens de la ville sont contents de leur travail ici.",
        "def garden(x):\n    return x\n\nimport os\nprint(x)\n",
        "<|im_end|> is the end of it, and the people of the town are in the garden with us.",
        "Copy code from the page and then you have what you need for the garden to be made.",
    ],
)
def test_filter_drops(answer: str) -> None:
    assert not keep_exchange(QUESTION, answer)


def test_filter_keeps_plain_english() -> None:
    assert keep_exchange(QUESTION, ANSWER)
    assert is_english(ANSWER)
    assert not is_code(ANSWER)


def test_the_same_opening_is_kept_once() -> None:
    records = [_record(f"chat{i}_0", ("human", QUESTION), ("gpt", ANSWER)) for i in range(3)]
    assert len(read_conversations(json.dumps(records))) == 1


def test_held_out_choice_is_by_chat_and_stable() -> None:
    chosen = [i for i in range(2000) if is_held_out(f"chat{i}")]
    assert 20 <= len(chosen) <= 60
    assert chosen == [i for i in range(2000) if is_held_out(f"chat{i}")]
