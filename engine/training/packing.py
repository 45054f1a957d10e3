"""From conversations to rows of token ids, through the shipped chat template.

Every row has `row_length` ids and starts where a conversation starts (or, for one longer than a
row, where a turn of it starts); several conversations share a row, each closed by <|endoftext|>.
Stored as uint16: ids need 13 bits, bit 15 marks what the assistant is to write.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.training.seed_conversations import SYSTEM_PROMPTS
from engine.training.tokenizer import END_OF_TEXT, TURN_END, TURN_START, token_id

if TYPE_CHECKING:
    import random

    import jinja2
    from tokenizers import Tokenizer

    from engine.training.corpus import Conversation

ASSISTANT_BIT = 1 << 15
_SYSTEM_PROMPT_SHARE = 0.15
_MIN_PIECE_TOKENS = 8

Ids = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class PackedCorpus:
    """uint16 [num_rows, row_length] for training and for measuring."""

    train: Ids
    held_out: Ids


def render(
    template: jinja2.Template, conversation: Conversation, system_prompt: str | None = None
) -> str:
    """The conversation as the template writes it, with an optional system turn."""
    messages = [{"role": turn.role, "content": turn.text} for turn in conversation.turns]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return template.render(messages=messages, add_generation_prompt=False)


def encode(tokenizer: Tokenizer, text: str) -> Ids:
    """Ids of a rendered conversation plus <|endoftext|>, assistant text marked with bit 15.

    Marked: what follows the closed thought up to and with <|im_end|>; the opening of the turn is
    given to the model by the generation prompt.
    """
    ids = np.array(tokenizer.encode(text).ids + [token_id(tokenizer, END_OF_TEXT)], np.uint16)
    think_end, turn_end = token_id(tokenizer, "</think>"), token_id(tokenizer, TURN_END)
    writing = False
    for index, current in enumerate(ids.tolist()):
        if writing:
            ids[index] |= ASSISTANT_BIT
        if current == think_end:
            writing = True
        elif current == turn_end:
            writing = False
    return ids


def split_long(ids: Ids, row_length: int, turn_start_id: int) -> Iterator[Ids]:
    """Cut ids into pieces of at most `row_length`, before a turn where one starts late enough."""
    begin = 0
    while len(ids) - begin > row_length:
        window = ids[begin : begin + row_length]
        starts = np.flatnonzero((window & ~np.uint16(ASSISTANT_BIT)) == turn_start_id)
        late = starts[starts > row_length // 2]
        cut = int(late[-1]) if len(late) else row_length
        yield window[:cut]
        begin += cut
    if len(ids) - begin >= _MIN_PIECE_TOKENS:
        yield ids[begin:]


def pack_rows(pieces: Sequence[Ids], row_length: int, pad_id: int) -> Ids:
    """Best fit: each piece, longest first, goes to the fullest row that still takes it.

    Returns uint16 [num_rows, row_length]; the little that stays empty holds `pad_id`.
    """
    by_room: dict[int, list[int]] = {}
    rows: list[list[Ids]] = []
    for piece in sorted(pieces, key=len, reverse=True):
        room = next((r for r in range(len(piece), row_length + 1) if by_room.get(r)), None)
        if room is None:
            row = len(rows)
            rows.append([])
            room = row_length
        else:
            row = by_room[room].pop()
        rows[row].append(piece)
        by_room.setdefault(room - len(piece), []).append(row)
    packed = np.full((len(rows), row_length), pad_id, np.uint16)
    for packed_row, row_pieces in zip(packed, rows, strict=True):
        joined = np.concatenate(row_pieces)
        packed_row[: len(joined)] = joined
    return packed


def tokenize(
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    template: jinja2.Template,
    row_length: int,
    rng: random.Random,
) -> Ids:
    """Render, encode, cut and pack; some conversations get one of a few common system prompts."""
    turn_start_id = token_id(tokenizer, TURN_START)
    pieces: list[Ids] = []
    for conversation in conversations:
        use_system = rng.random() < _SYSTEM_PROMPT_SHARE
        system_prompt = rng.choice(SYSTEM_PROMPTS) if use_system else None
        ids = encode(tokenizer, render(template, conversation, system_prompt))
        pieces += split_long(ids, row_length, turn_start_id)
    rng.shuffle(pieces)
    return pack_rows(pieces, row_length, token_id(tokenizer, END_OF_TEXT))


def save_packed(corpus: PackedCorpus, path: Path) -> None:
    """One .npy per split, xz-compressed side by side in a folder."""
    path.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", corpus.train), ("held_out", corpus.held_out)):
        with lzma.open(path / f"{name}.npy.xz", "wb", preset=3) as file:
            np.save(file, rows, allow_pickle=False)


def load_rows(path: Path) -> Ids:
    """Read one split written by `save_packed`."""
    with lzma.open(path, "rb") as file:
        rows: Ids = np.load(file, allow_pickle=False)
    return rows
