"""A rejected draft leaves no trace: after any accept count the engine goes on as if it had never drafted."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from tests.oracle import tiny
from tests.oracle.driver import seat
from tests.oracle.test_engine_trunk import assert_logits, read, step
from tests.oracle.tolerances import ROLLBACK_LOGITS

if TYPE_CHECKING:
    from torch import Tensor

    from tests.oracle.conftest import Models

NAMES = sorted(tiny.GRID)
CHAIN = 4
AFTER = 12
"""Tokens read after the rejection: more than any convolution looks back."""


def window_with_wrong_drafts(
    name: str, ids: list[int], start: int, num_right: int
) -> tuple[int, ...]:
    """[t, d1..d4]: the true token at start, then num_right true ones, then others (EOS first, which cuts n-grams)."""
    vocab = tiny.GRID[name].config().vocab_size
    right = ids[start : start + 1 + num_right]
    wrong: list[int] = []
    for position in range(start + len(right), start + 1 + CHAIN):
        other = tiny.EOS if not wrong else 5
        wrong.append(other if ids[position] != other else (other + 7) % vocab)
    return (*right, *wrong)


class NeverDrafted:
    """Logits of a text read up to a prefix and decoded one by one from there, computed once."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._logits: dict[tuple[str, int], Tensor] = {}

    def logits(self, name: str, prefix: int) -> Tensor:
        """Of the text's first prefix + 1 + CHAIN + AFTER tokens. [T, V]."""
        if (name, prefix) not in self._logits:
            engine = self._models.engine(name)
            ids = tiny.text(name)[: prefix + 1 + CHAIN + AFTER]
            seat(engine, 0)
            parts = (read(engine, 0, ids[:prefix]), step(engine, 0, ids[prefix:]))
            self._logits[name, prefix] = torch.cat(parts)
        return self._logits[name, prefix]


@pytest.fixture(scope="module")
def never_drafted(models: Models) -> NeverDrafted:
    return NeverDrafted(models)


@pytest.mark.parametrize("num_right", range(CHAIN + 1))
# Before, at and after the budget; a block completed by drafts; EOS in the window (positions 30, 31, 77).
@pytest.mark.parametrize("prefix", [3, 15, 19, 28, 75])
@pytest.mark.parametrize("name", NAMES)
def test_going_on_after_a_rejection(
    models: Models, never_drafted: NeverDrafted, name: str, prefix: int, num_right: int
) -> None:
    engine, ids = models.engine(name), tiny.text(name)
    accepted = prefix + 1 + num_right
    end = accepted + AFTER
    plain = never_drafted.logits(name, prefix)

    seat(engine, 0)
    read(engine, 0, ids[:prefix])
    window = window_with_wrong_drafts(name, ids, prefix, num_right)
    drafted = engine.verify_logits({0: window})[0][: 1 + num_right].clone()
    engine.commit({0: 1 + num_right})
    after = step(engine, 0, ids[accepted:end])

    torch.testing.assert_close(drafted, plain[prefix:accepted], atol=ROLLBACK_LOGITS, rtol=0)
    torch.testing.assert_close(after, plain[accepted:end], atol=ROLLBACK_LOGITS, rtol=0)
    # All rows went through windows, whose arithmetic does not depend on their height: the bits agree too.
    assert torch.equal(drafted, plain[prefix:accepted])
    assert torch.equal(after, plain[accepted:end])
    assert_logits(after, models.hf_logits(name, ids)[accepted:end])


@pytest.mark.parametrize("name", NAMES)
def test_rejection_after_rejection(models: Models, name: str) -> None:
    engine, ids = models.engine(name), tiny.text(name)
    expected = models.hf_logits(name, ids)
    seat(engine, 1)
    read(engine, 1, ids[:11])
    start = 11
    for num_right in itertools.cycle((0, 0, 3, 1, 4, 2, 0, 4, 4, 1)):
        if start + 1 + CHAIN > len(ids):
            break
        window = window_with_wrong_drafts(name, ids, start, num_right)
        logits = engine.verify_logits({1: window})[1]
        assert_logits(logits[: 1 + num_right], expected[start : start + 1 + num_right])
        engine.commit({1: 1 + num_right})
        start += 1 + num_right


@pytest.mark.parametrize("name", NAMES)
def test_every_slot_rejects_for_itself(models: Models, name: str) -> None:
    engine = models.engine(name)
    texts = [tiny.text(name, seed) for seed in range(4)]
    starts = [8, 17, 26, 50]
    seat(engine, 0, 1, 2, 3)
    for slot in range(4):
        read(engine, slot, texts[slot][: starts[slot]])
    for turn in range(9):
        num_right = [(slot + 2 * turn) % (CHAIN + 1) for slot in range(4)]
        windows = {
            slot: window_with_wrong_drafts(name, texts[slot], starts[slot], num_right[slot])
            for slot in range(4)
        }
        logits = engine.verify_logits(windows)
        for slot in range(4):
            end = starts[slot] + 1 + num_right[slot]
            expected = models.hf_logits(name, texts[slot])[starts[slot] : end]
            assert_logits(logits[slot][: 1 + num_right[slot]], expected)
            starts[slot] = end
        engine.commit({slot: 1 + num_right[slot] for slot in range(4)})


@pytest.mark.parametrize("name", NAMES)
def test_prompt_read_on_after_a_rejection(models: Models, name: str) -> None:
    """The prompt path continues from a rolled-back state, as a follow-up turn in the same slot does."""
    engine, ids = models.engine(name), tiny.text(name)[:70]
    seat(engine, 0)
    read(engine, 0, ids[:25])
    engine.verify_logits({0: window_with_wrong_drafts(name, ids, 25, 2)})
    engine.commit({0: 3})
    actual = torch.cat([engine.prefill_logits(0, ids[a:b], a) for a, b in ((28, 41), (41, 70))])
    assert_logits(actual, models.hf_logits(name, ids)[28:])
