"""Who goes first."""

from __future__ import annotations

from dataclasses import replace

from cache.eviction import Candidate, choose_victim

PLAIN = Candidate(
    index=0,
    is_superseded=False,
    saved_tokens=100,
    freed_bytes=1000,
    num_uses=0,
    last_used=5,
    floor=0.0,
)


def first(*candidates: Candidate) -> int:
    numbered = [replace(candidate, index=i) for i, candidate in enumerate(candidates)]
    return choose_victim(numbered).index


def test_a_superseded_copy_goes_before_anything_else() -> None:
    worthless = replace(PLAIN, saved_tokens=1)
    copy = replace(PLAIN, is_superseded=True, num_uses=9, last_used=9)
    assert first(worthless, copy) == 1
    assert first(copy, replace(copy, last_used=3), worthless) == 1


def test_the_least_tokens_per_byte_goes_first() -> None:
    assert first(PLAIN, replace(PLAIN, freed_bytes=2000)) == 1
    assert first(PLAIN, replace(PLAIN, saved_tokens=50)) == 1
    assert first(replace(PLAIN, num_uses=1), PLAIN) == 1


def test_among_equals_the_one_used_longest_ago_goes_first() -> None:
    assert first(PLAIN, replace(PLAIN, last_used=4)) == 1


def test_what_was_valuable_long_ago_does_not_stay_for_ever() -> None:
    once_popular = replace(PLAIN, num_uses=4, floor=0.0)
    recent = replace(PLAIN, floor=0.6)
    assert first(once_popular, recent) == 0


def test_what_frees_nothing_is_worth_most() -> None:
    assert first(replace(PLAIN, freed_bytes=0), PLAIN) == 1
