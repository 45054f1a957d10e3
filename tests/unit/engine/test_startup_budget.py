"""The size of the expert cache: the formula, the reserve, the refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import PlanRefused
from engine.memory_plan import MIB
from engine.startup_budget import (
    DEFAULT_RESERVE_MIB,
    LOW_MIB,
    MIN_RESERVE_MIB,
    CacheRequest,
    CacheRoom,
    CacheSize,
    low_memory_line,
    size_cache,
    slots_per_layer,
)


def room(free_mib: int, *, blob_mib: int = 2, min_slots: int = 20) -> CacheRoom:
    return CacheRoom(
        free_bytes=free_mib * MIB,
        blob_bytes=blob_mib * MIB,
        num_pairs=5000,
        min_slots=min_slots,
        prompt_bytes=100 * MIB,
        draft_bytes=50 * MIB,
        session_bytes=321 * MIB,
    )


def test_auto_divides_what_is_free_less_the_reserve_by_the_largest_expert() -> None:
    size = size_cache(CacheRequest(reserve_mib=1600), room(10_000))
    assert size.num_slots == (10_000 - 1600 - 100 - 50) // 2
    assert size.lines == (
        "expert cache auto: 9.77 GiB free, 1600 MiB reserved (+100 MiB for the prompt path, "
        "+50 MiB for the draft head) -> 4125 slots",
    )


def test_slots_without_a_candidate_are_not_opened() -> None:
    assert size_cache(CacheRequest(num_ranked=77), room(10_000)).num_slots == 77
    assert size_cache(CacheRequest(), room(100_000)).num_slots == 5000


@given(free_mib=st.integers(300, 1500), blob_mib=st.integers(1, 9), min_slots=st.integers(1, 60))
def test_the_default_reserve_drops_to_what_leaves_the_smallest_cache_and_no_further(
    free_mib: int, blob_mib: int, min_slots: int
) -> None:
    there = room(free_mib, blob_mib=blob_mib, min_slots=min_slots)
    spare = free_mib - 150 - min_slots * blob_mib
    try:
        size = size_cache(CacheRequest(), there)
    except PlanRefused:
        assert free_mib - 150 - MIN_RESERVE_MIB < blob_mib
        return
    assert size.was_lowered == (spare < DEFAULT_RESERVE_MIB)
    assert size.reserve_mib == max(MIN_RESERVE_MIB, min(DEFAULT_RESERVE_MIB, spare))
    assert size.num_slots * blob_mib <= free_mib - 150 - size.reserve_mib
    if size.was_lowered and spare >= MIN_RESERVE_MIB:
        assert size.num_slots == min_slots
        assert f"lowered from 700 to {spare} MiB" in size.lines[1]


def test_a_reserve_given_by_hand_stays() -> None:
    tight = room(900)
    assert size_cache(CacheRequest(), tight).was_lowered is False
    assert size_cache(CacheRequest(reserve_mib=740), tight).num_slots == 5
    with pytest.raises(PlanRefused, match="one slot needs 892 MiB free .740 MiB reserved"):
        size_cache(CacheRequest(reserve_mib=740), room(891))


def test_no_slot_is_refused_with_every_number_and_the_options() -> None:
    with pytest.raises(PlanRefused) as refused:
        size_cache(CacheRequest(), room(440))
    text = str(refused.value)
    for part in ("452 MiB", "440 MiB are free", "12 MiB short", "300 MiB reserved", "321 MiB"):
        assert part in text
    for option in ("--max-context", "--batch", "--vram-reserve-mib", "--expert-cache 0"):
        assert option in text


def test_an_explicit_size_is_taken_or_refused_never_cut() -> None:
    assert size_cache(CacheRequest(num_slots=425), room(1000)).num_slots == 425
    with pytest.raises(
        PlanRefused,
        match="--expert-cache 426: needs 1002 MiB .* 1000 MiB are free .* give at most 425",
    ):
        size_cache(CacheRequest(num_slots=426), room(1000))
    with pytest.raises(PlanRefused, match="there are 77 pairs in the profile"):
        size_cache(CacheRequest(num_slots=78, num_ranked=77), room(10_000))
    with pytest.raises(PlanRefused, match="there are 5000 pairs of layer and expert"):
        size_cache(CacheRequest(num_slots=5001), room(100_000))
    assert size_cache(CacheRequest(num_slots=0), room(1000)).num_slots == 0


@pytest.mark.parametrize("term", ["free_bytes", "blob_bytes", "prompt_bytes", "draft_bytes"])
def test_every_term_counts_in_both_directions(term: str) -> None:
    """An error that makes the cache smaller looks careful and is as wrong as one that makes it larger."""
    there = room(10_000)
    slots = size_cache(CacheRequest(), there).num_slots
    step = MIB if term == "blob_bytes" else there.blob_bytes
    for change in (-step, step):
        wrong = replace(there, **{term: getattr(there, term) + change})
        assert size_cache(CacheRequest(), wrong).num_slots != slots


def test_little_memory_at_the_end_is_said_with_the_reserve_to_ask_for() -> None:
    size = CacheSize(num_slots=9, reserve_mib=700, was_lowered=False, lines=())
    assert low_memory_line(LOW_MIB * MIB, size) is None
    assert low_memory_line(200 * MIB, size) == (
        "LOW: 200 MiB are free, 256 are safe: give --vram-reserve-mib 1012"
    )
    lowered = CacheSize(num_slots=9, reserve_mib=300, was_lowered=True, lines=())
    assert "only just fits" in str(low_memory_line(5 * MIB, lowered))


@given(
    num_slots=st.integers(0, 60),
    useful=st.lists(st.integers(0, 9), min_size=1, max_size=8).map(tuple),
)
def test_slots_are_divided_evenly_and_none_is_wasted(
    num_slots: int, useful: tuple[int, ...]
) -> None:
    share = slots_per_layer(num_slots, useful)
    assert sum(share) == min(num_slots, sum(useful))
    assert all(given <= most for given, most in zip(share, useful, strict=True))
    open_layers = [given for given, most in zip(share, useful, strict=True) if given < most]
    if open_layers:
        assert max(share) <= min(open_layers) + 1


@pytest.mark.parametrize("num_slots", [None, 0, 5])
def test_sessions_that_do_not_fit_are_not_answered_with_fewer_experts(
    num_slots: int | None,
) -> None:
    """Weights and sessions alone are larger than the device: no number of slots helps."""
    with pytest.raises(PlanRefused, match=r"lower --max-context, --batch") as refused:
        size_cache(CacheRequest(num_slots=num_slots), room(-3000))
    assert "0 MiB are free" in str(refused.value)
    assert "--expert-cache 0:" not in str(refused.value).partition("free")[2]
    assert "give at most" not in str(refused.value)
