"""Which drafts are kept, against brute force over every short case."""

from __future__ import annotations

from itertools import product

from engine.acceptance import accept


def test_every_short_case() -> None:
    for num_drafts in range(4):
        for drafts in product((1, 2), repeat=num_drafts):
            for picks in product((1, 2), repeat=num_drafts + 1):
                for stops in (frozenset[int](), frozenset({2})):
                    _check(picks, drafts, stops)


def _check(picks: tuple[int, ...], drafts: tuple[int, ...], stops: frozenset[int]) -> None:
    plain: list[int] = []
    for i, pick in enumerate(picks):
        plain.append(pick)
        agreed = i < len(drafts) and drafts[i] == pick
        if not agreed or pick in stops:
            break
    accepted = accept(picks, drafts, stops)
    assert accepted.token_ids == tuple(plain)
    matches = [i for i in range(len(drafts) + 1) if picks[:i] == drafts[:i]]
    assert accepted.num_accepted == max(matches)


def test_a_stop_in_mid_chain_ends_exactly_there() -> None:
    accepted = accept([5, 9, 6, 7], [5, 9, 6], frozenset({9}))
    assert accepted.token_ids == (5, 9)
    assert accepted.num_accepted == 3
