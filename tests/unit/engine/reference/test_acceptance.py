"""Which drafts stand."""

from __future__ import annotations

import itertools

import pytest

from engine.reference.acceptance import accept


@pytest.mark.parametrize(
    ("drafts", "picks", "token_ids", "num_accepted"),
    [
        ([], [5], (5,), 0),
        ([1, 2, 3], [1, 2, 3, 4], (1, 2, 3, 4), 3),
        ([1, 2, 3], [1, 9, 3, 4], (1, 9), 1),
        ([1, 2, 3], [9, 2, 3, 4], (9,), 0),
    ],
)
def test_longest_equal_prefix_and_the_bonus(
    drafts: list[int], picks: list[int], token_ids: tuple[int, ...], num_accepted: int
) -> None:
    answer = accept(drafts, picks)
    assert (answer.token_ids, answer.num_accepted) == (token_ids, num_accepted)


@pytest.mark.parametrize(
    ("picks", "token_ids"),
    [([1, 7, 3, 4], (1, 7)), ([7, 2, 3, 4], (7,)), ([1, 2, 3, 7], (1, 2, 3, 7))],
)
def test_nothing_follows_a_stop_id(picks: list[int], token_ids: tuple[int, ...]) -> None:
    answer = accept(picks[:3], picks, stop_ids={7, 8})
    assert answer.token_ids == token_ids
    assert answer.num_accepted == 3


def test_every_small_case_by_its_definition() -> None:
    for drafts in itertools.product((0, 1), repeat=3):
        for picks in itertools.product((0, 1), repeat=4):
            answer = accept(drafts, picks)
            kept = answer.num_accepted
            assert drafts[:kept] == picks[:kept]
            assert kept == 3 or drafts[kept] != picks[kept]
            assert answer.token_ids == picks[: kept + 1]


def test_wrong_number_of_picks_is_refused() -> None:
    with pytest.raises(ValueError, match="2 drafts need 3 picks, not 2"):
        accept([1, 2], [1, 2])
