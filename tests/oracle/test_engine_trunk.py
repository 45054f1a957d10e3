"""The engine's logits against Hugging Face's, however a text is read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from engine.loading import load_engine
from engine.model import Trunk
from tests.oracle import tiny
from tests.oracle.driver import seat
from tests.oracle.tolerances import ENGINE_LOGITS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.engine import TorchEngine
    from engine.state import SlotState
    from tests.oracle.conftest import Models

NAMES = sorted(tiny.GRID)

CUTS = {
    "ones": [1],
    "threes": [3],
    "sevens": [7],
    "chunks": [32],
    "uneven": [1, 2, 31, 5, 32, 13, 4],
}
"""Sizes of the pieces, over and over until the text ends."""


def read(engine: TorchEngine, slot: int, ids: list[int], sizes: Iterable[int] = (32,)) -> Tensor:
    """Read a text from its start through the prompt path, in pieces. Logits [T, V]."""
    start, rows = 0, list[Tensor]()
    for size in itertools.cycle(sizes):
        if start >= len(ids):
            break
        piece = ids[start : start + size]
        rows.append(engine.prefill_logits(slot, piece, start).clone())
        start += len(piece)
    return torch.cat(rows)


def step(engine: TorchEngine, slot: int, ids: list[int]) -> Tensor:
    """Feed ids one by one through windows of one row. Logits [T, V]."""
    rows: list[Tensor] = []
    for token_id in ids:
        rows.append(engine.verify_logits({slot: (token_id,)})[slot].clone())
        engine.commit({slot: 1})
    return torch.cat(rows)


def assert_logits(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=ENGINE_LOGITS, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_a_piece_of_any_length_keeps_its_rows_one_after_another_when_it_is_copied(
    checkpoints: Models, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for another device, whose kernels read the ids row by row."""
    engine = load_engine(replace(checkpoints.config("gqa3_gdn2"), kernels="torch"))
    pieces: list[Tensor] = []
    chunk = Trunk.chunk

    def look(trunk: Trunk, ids: Tensor, slot: int, start: int, state: SlotState) -> Tensor:
        pieces.append(ids.clone())
        return chunk(trunk, ids, slot, start, state)

    monkeypatch.setattr(Trunk, "chunk", look)
    engine.read(0, [3, 4, 5, 6], 0)
    engine.read(0, list(range(7, 7 + num_rows)), 4)
    copied = pieces[1]
    width = engine.steps.ngram_context + 1
    assert width > 2
    assert copied.is_contiguous()
    known = range(3, 7 + num_rows)
    assert copied.tolist() == [
        list(known[i : i + width]) for i in range(5 - width, 5 - width + num_rows)
    ]


@pytest.mark.parametrize("cuts", sorted(CUTS))
@pytest.mark.parametrize("name", NAMES)
def test_prompt_in_pieces(models: Models, name: str, cuts: str) -> None:
    engine, ids = models.engine(name), tiny.text(name)[:119]
    seat(engine, 1)
    assert_logits(read(engine, 1, ids, CUTS[cuts]), models.hf_logits(name, ids))


@pytest.mark.parametrize("length", [1, 2, 15, 19, 20, 21, 33])
@pytest.mark.parametrize("name", NAMES)
def test_short_prompts(models: Models, name: str, length: int) -> None:
    engine, ids = models.engine(name), tiny.text(name, seed=1)[:length]
    seat(engine, 0)
    assert_logits(read(engine, 0, ids), models.hf_logits(name, ids))


@pytest.mark.parametrize("prefix", [1, 14, 61])
@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(models: Models, name: str, prefix: int) -> None:
    engine, ids = models.engine(name), tiny.text(name)[: prefix + 50]
    seat(engine, 2)
    actual = torch.cat((read(engine, 2, ids[:prefix]), step(engine, 2, ids[prefix:])))
    assert_logits(actual, models.hf_logits(name, ids))


@pytest.mark.parametrize("name", NAMES)
def test_windows_of_every_height(models: Models, name: str) -> None:
    engine, ids = models.engine(name), tiny.text(name)[:110]
    seat(engine, 0)
    rows, start = [read(engine, 0, ids[:9])], 9
    for height in itertools.cycle((5, 1, 4, 2, 3)):
        window = tuple(ids[start : start + height])
        if not window:
            break
        rows.append(engine.verify_logits({0: window})[0].clone())
        engine.commit({0: len(window)})
        start += len(window)
    assert_logits(torch.cat(rows), models.hf_logits(name, ids))


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_different_lengths_and_heights_in_one_window(models: Models, name: str) -> None:
    engine = models.engine(name)
    texts = [tiny.text(name, seed) for seed in range(4)]
    lengths, heights = [5, 18, 44, 71], [5, 3, 1, 2]
    seat(engine, 0, 1, 2, 3)
    for slot in range(4):
        read(engine, slot, texts[slot][: lengths[slot]])
    for _ in range(8):
        ends = [length + height for length, height in zip(lengths, heights, strict=True)]
        windows = {slot: tuple(texts[slot][lengths[slot] : ends[slot]]) for slot in range(4)}
        logits = engine.verify_logits(windows)
        for slot in range(4):
            expected = models.hf_logits(name, texts[slot])[lengths[slot] : ends[slot]]
            assert_logits(logits[slot], expected)
        engine.commit({slot: heights[slot] for slot in range(4)})
        lengths, heights = ends, [*heights[1:], heights[0]]


@pytest.mark.parametrize("name", NAMES)
def test_reading_one_slot_between_the_windows_of_another(models: Models, name: str) -> None:
    engine = models.engine(name)
    first, second = tiny.text(name, 0)[:60], tiny.text(name, 1)[:60]
    seat(engine, 0, 1)
    decoded, pieces = [read(engine, 0, first[:30])], list[Tensor]()
    for start in range(30, 60, 5):
        decoded.append(step(engine, 0, first[start : start + 5]))
        at = (start - 30) * 2
        pieces.append(engine.prefill_logits(1, second[at : at + 10], at).clone())
    assert_logits(torch.cat(decoded), models.hf_logits(name, first))
    assert_logits(torch.cat(pieces), models.hf_logits(name, second))


@pytest.mark.parametrize("name", NAMES)
def test_a_new_sequence_sees_nothing_of_the_last_one(models: Models, name: str) -> None:
    engine = models.engine(name)
    seat(engine, 3)
    read(engine, 3, tiny.text(name, 2))
    engine.verify_logits({3: tuple(tiny.text(name, 3)[:5])})
    engine.commit({3: 2})
    ids = tiny.text(name, 1)[:40]
    seat(engine, 3)
    actual = torch.cat((read(engine, 3, ids[:33]), step(engine, 3, ids[33:])))
    assert_logits(actual, models.hf_logits(name, ids))


@pytest.mark.parametrize("name", NAMES)
def test_one_token_over_and_over(models: Models, name: str) -> None:
    engine, ids = models.engine(name), tiny.monotone_text(name)
    seat(engine, 0)
    assert_logits(read(engine, 0, ids), models.hf_logits(name, ids))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_draft_layer(models: Models, name: str) -> None:
    engine = load_engine(models.config(name, with_mtp=False, max_draft=0))
    ids = tiny.text(name)[:40]
    seat(engine, 0)
    actual = torch.cat((read(engine, 0, ids[:35]), step(engine, 0, ids[35:])))
    assert_logits(actual, models.hf_logits(name, ids))
    assert engine.info.max_draft == 0
    engine.close()
