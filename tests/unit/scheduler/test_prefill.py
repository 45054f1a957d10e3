"""Cuts depend on the prompt alone; picks are short first, bounded by ageing; decoding gets its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import WindowTimes
from scheduler.prefill import PromptBid, ReadShare, chunk_end, pick_chunks

TURN = 7


def cuts(
    prompt_ids: tuple[int, ...], chunk_tokens: int, turn_token_id: int | None = TURN
) -> list[int]:
    ends: list[int] = []
    while not ends or ends[-1] < len(prompt_ids):
        start = ends[-1] if ends else 0
        ends.append(
            chunk_end(prompt_ids, start, chunk_tokens=chunk_tokens, turn_token_id=turn_token_id)
        )
    return ends


@pytest.mark.parametrize(
    ("prompt_ids", "ends"),
    [
        ((1,), [1]),
        ((1,) * 4, [4]),
        ((1,) * 5, [4, 5]),
        ((TURN, 1, 1), [3]),
        ((1, TURN, 1, 1, 1), [1, 4, 5]),
        ((TURN, TURN, TURN), [1, 2, 3]),
        ((1, 1, 1, 1, TURN, 1), [4, 6]),
        ((1, 1, TURN), [2, 3]),
    ],
)
def test_cuts_are_multiples_and_turn_starts(prompt_ids: tuple[int, ...], ends: list[int]) -> None:
    assert cuts(prompt_ids, 4) == ends


def test_without_a_turn_token_only_multiples_cut() -> None:
    assert cuts((TURN,) * 10, 4, None) == [4, 8, 10]


prompts = st.lists(st.integers(1, 9), min_size=1, max_size=60).map(tuple)


@given(prompt=prompts, more=prompts, chunk_tokens=st.integers(1, 12))
def test_a_longer_prompt_keeps_the_cuts_of_its_prefix(
    prompt: tuple[int, ...], more: tuple[int, ...], chunk_tokens: int
) -> None:
    """So a state at any cut but the last serves every prompt with the same beginning."""
    of_prefix, of_whole = cuts(prompt, chunk_tokens), cuts(prompt + more, chunk_tokens)
    assert of_whole[: len(of_prefix) - 1] == of_prefix[:-1]


@given(prompt=prompts, chunk_tokens=st.integers(1, 12))
def test_cuts_cover_the_prompt_in_chunks_of_allowed_length(
    prompt: tuple[int, ...], chunk_tokens: int
) -> None:
    ends = cuts(prompt, chunk_tokens)
    starts = [0, *ends[:-1]]
    assert ends[-1] == len(prompt)
    for start, end in zip(starts, ends, strict=True):
        assert start < end
        assert start // chunk_tokens == (end - 1) // chunk_tokens
        assert TURN not in prompt[start + 1 : end]


def bid(
    slot: int,
    unread: int,
    *,
    next_tokens: int | None = None,
    priority: int = 0,
    num_passes: int = 0,
) -> PromptBid:
    return PromptBid(
        slot=slot,
        next_tokens=min(unread, 64) if next_tokens is None else next_tokens,
        unread_tokens=unread,
        priority=priority,
        num_passes=num_passes,
        arrival=slot,
    )


def pick(*bids: PromptBid) -> tuple[int, ...]:
    return pick_chunks(bids, budget_tokens=64, max_passes=4)


def test_what_is_read_soonest_goes_first() -> None:
    assert pick(bid(0, 5000), bid(1, 300)) == (1,)


def test_equals_go_by_arrival() -> None:
    assert pick(bid(1, 300), bid(0, 300)) == (0,)


def test_several_short_prompts_share_a_window() -> None:
    assert pick(bid(0, 20), bid(1, 30), bid(2, 40), bid(3, 10)) == (3, 0, 1)


def test_a_small_chunk_of_a_long_prompt_fills_what_is_left() -> None:
    assert pick(bid(0, 40), bid(1, 500), bid(2, 900, next_tokens=20)) == (0, 2)


def test_one_chunk_is_read_even_beyond_the_budget() -> None:
    assert pick_chunks([bid(0, 64)], budget_tokens=1, max_passes=4) == (0,)


def test_priority_beats_length_and_age_beats_priority() -> None:
    assert pick(bid(0, 5000, priority=1), bid(1, 300)) == (0,)
    assert pick(bid(0, 5000, num_passes=4), bid(1, 300, priority=9)) == (0,)


@given(rivals=st.integers(1, 3), max_passes=st.integers(1, 6))
def test_nobody_starves(rivals: int, max_passes: int) -> None:
    """A long prompt among endless short ones reads a chunk at least every max_passes + 1 windows."""
    passes = 0
    for _ in range(50):
        bids = [bid(0, 10**6, num_passes=passes), *(bid(slot + 1, 64) for slot in range(rivals))]
        picked = pick_chunks(bids, budget_tokens=64, max_passes=max_passes)
        passes = 0 if 0 in picked else passes + 1
        assert passes <= max_passes


def times(*, prefill_s: float = 0.0, decode_s: float = 0.0) -> WindowTimes:
    return WindowTimes(prefill_s=prefill_s, draft_s=decode_s / 4, verify_s=decode_s * 3 / 4)


def test_a_chunk_is_followed_by_its_share_of_decoding() -> None:
    share = ReadShare(decode_share=0.5)
    assert share.may_read(has_decodes=True)
    share = share.after(times(prefill_s=0.1, decode_s=0.02), has_decodes=True)
    windows = 0
    while not share.may_read(has_decodes=True):
        share = share.after(times(decode_s=0.011), has_decodes=True)
        windows += 1
    assert windows == 3  # 0.05 s are owed, 0.02 s were paid beside the chunk


def test_without_decodes_nothing_is_owed() -> None:
    share = ReadShare(decode_share=0.5, owed_s=1.0)
    assert share.may_read(has_decodes=False)
    assert share.after(times(prefill_s=1.0), has_decodes=False).owed_s == 0.0


def test_a_share_of_nothing_always_reads() -> None:
    share = ReadShare(decode_share=0.0).after(times(prefill_s=1.0), has_decodes=True)
    assert share.may_read(has_decodes=True)


def test_decoding_pays_no_credit_ahead() -> None:
    share = ReadShare(decode_share=1.0).after(times(decode_s=9.0), has_decodes=True)
    assert not share.after(times(prefill_s=0.1), has_decodes=True).may_read(has_decodes=True)
