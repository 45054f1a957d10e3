from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from engine.training.tokenizer import (
    MARKUP_TOKENS,
    NUM_ADDED_TOKENS,
    SPECIAL_TOKENS,
    train_tokenizer,
)

from .conftest import DEFAULT_MODEL_DIR

TEXTS = ["the cat sat on the mat and the dog sat on the log"] * 4 + ["it's 42 o'clock, isn't it?\n"]


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return Tokenizer.from_file(str(DEFAULT_MODEL_DIR / "tokenizer.json"))


@pytest.mark.parametrize(
    "text",
    ["Hello, world!", "naïve café", "日本 😀", "  two  spaces\n\n\tand tabs ", "a\u0301", "x=1;"],
)
def test_any_text_survives_the_round_trip_in_nfc(shipped: Tokenizer, text: str) -> None:
    expected = text.replace("a\u0301", "á")
    assert shipped.decode(shipped.encode(text).ids, skip_special_tokens=False) == expected


def test_added_tokens_are_the_last_ids(shipped: Tokenizer) -> None:
    config = json.loads((DEFAULT_MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    first = config["vocab_size"] - NUM_ADDED_TOKENS
    assert shipped.get_vocab_size() == config["vocab_size"]
    for offset, token in enumerate(SPECIAL_TOKENS + MARKUP_TOKENS):
        assert shipped.token_to_id(token) == first + offset
        assert shipped.encode(f"a{token}b").ids.count(first + offset) == 1


def test_config_names_the_tokenizers_end_ids(shipped: Tokenizer) -> None:
    config = json.loads((DEFAULT_MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    text = (DEFAULT_MODEL_DIR / "generation_config.json").read_text(encoding="utf-8")
    end_of_text = shipped.token_to_id("<|endoftext|>")
    assert config["eos_token_id"] == config["bos_token_id"] == end_of_text
    assert json.loads(text)["eos_token_id"] == [shipped.token_to_id("<|im_end|>"), end_of_text]


def test_skipping_special_tokens_keeps_markup(shipped: Tokenizer) -> None:
    ids = shipped.encode("<think>\nhm\n</think>\n\nyes<|im_end|>").ids
    assert shipped.decode(ids, skip_special_tokens=True) == "<think>\nhm\n</think>\n\nyes"


def test_training_gives_exactly_the_asked_vocabulary() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=256 + 20 + NUM_ADDED_TOKENS)
    assert tokenizer.get_vocab_size() == 256 + 20 + NUM_ADDED_TOKENS
    assert tokenizer.decode(tokenizer.encode("the dog").ids) == "the dog"


def test_too_little_text_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="asked 5000"):
        train_tokenizer(TEXTS, vocab_size=5000)
