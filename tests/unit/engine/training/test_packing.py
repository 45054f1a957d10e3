from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.training.corpus import Conversation, Turn
from engine.training.packing import (
    ASSISTANT_BIT,
    PackedCorpus,
    encode,
    load_rows,
    pack_rows,
    render,
    save_packed,
    split_long,
)
from engine.training.tokenizer import load_template

from .conftest import DEFAULT_MODEL_DIR


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEFAULT_MODEL_DIR / "tokenizer.json"))


def _ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return np.array(values, np.uint16)


def test_only_what_the_assistant_writes_is_marked(tokenizer: Tokenizer) -> None:
    template = load_template(DEFAULT_MODEL_DIR / "chat_template.jinja")
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello there"))
    ids = encode(tokenizer, render(template, Conversation("a", turns * 2), "Be brief."))
    marked = [int(i) - ASSISTANT_BIT for i in ids if i >= ASSISTANT_BIT]
    text = tokenizer.decode(marked, skip_special_tokens=False)
    assert text == "\n\nHello there<|im_end|>" * 2
    assert tokenizer.decode([int(ids[-1])], skip_special_tokens=False) == "<|endoftext|>"


def test_long_conversations_are_cut_before_a_turn() -> None:
    ids = np.arange(100, 140, dtype=np.uint16)
    ids[[0, 15, 28]] = 7
    pieces = list(split_long(ids, row_length=20, turn_start_id=7))
    assert [len(piece) for piece in pieces] == [15, 13, 12]
    assert np.array_equal(np.concatenate(pieces), ids)


def test_packing_keeps_every_piece_whole_and_fills_rows() -> None:
    pieces = [np.full(n, n, np.uint16) for n in (9, 3, 6, 1, 5, 4, 2)]
    rows = pack_rows(pieces, row_length=10, pad_id=0)
    assert rows.shape == (3, 10)
    for piece in pieces:
        assert (rows == len(piece)).sum() == len(piece)


def test_packed_rows_survive_saving(tmp_path: Path) -> None:
    corpus = PackedCorpus(train=_ids(1, ASSISTANT_BIT | 2)[None], held_out=_ids(3, 4)[None])
    save_packed(corpus, tmp_path)
    assert np.array_equal(load_rows(tmp_path / "train.npy.xz"), corpus.train)
    assert np.array_equal(load_rows(tmp_path / "held_out.npy.xz"), corpus.held_out)
