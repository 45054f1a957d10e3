"""The reference sampler: known answers of the noise, the distribution of picks, every option by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.interface import SamplingParams
from engine.reference.sampling import (
    History,
    gumbel_noise,
    kept_ids,
    mix,
    pick,
    pick_window,
    process_logits,
    token_logprobs,
)

NO_HISTORY = History(prompt_ids=(), output_ids=())


def logits_of(seed: int, num_ids: int = 13, scale: float = 2.0) -> Tensor:
    return torch.randn(num_ids, generator=torch.Generator().manual_seed(seed)) * scale


# --- noise -------------------------------------------------------------------------------------------------------


def noise_in_python_ints(seed: int, position: int, token_id: int) -> float:
    """The definition once more with nothing but Python's own numbers."""

    def finalise(z: int) -> int:
        z ^= z >> 30
        z = z * 0xBF58476D1CE4E5B9 % 2**64
        z ^= z >> 27
        z = z * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    key = finalise((seed + gamma * (position + 1)) % 2**64)
    bits = finalise((key + gamma * (token_id + 1)) % 2**64)
    u = (float(bits >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(u))


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    """First outputs of the published generator with state 1234567; it adds the constant, then mixes."""
    state, outputs = 1234567, list[int]()
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(mix(state))
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(
    ("seed", "position", "token_id", "noise"),
    [
        (0, 0, 0, 0.8509171899612384),
        (0, 0, 1, 1.0357928357330763),
        (1, 0, 0, 0.0008428699248495371),
        (0, 1, 0, -0.25193192759912103),
        (42, 7, 1000, 0.02562773553249226),
        (18446744073709551615, 262143, 248319, 0.8886369223511782),
        (9223372036854775808, 12345, 8191, -0.1024393084543426),
    ],
)
def test_noise_has_known_answers(seed: int, position: int, token_id: int, noise: float) -> None:
    assert noise_in_python_ints(seed, position, token_id) == pytest.approx(noise, rel=1e-12)
    assert gumbel_noise(seed, position, token_id + 1)[token_id] == pytest.approx(noise, rel=1e-12)


def test_the_largest_and_the_smallest_bits_have_finite_noise() -> None:
    for bits in (0, 2**64 - 1):
        u = (float(bits >> 12) + 0.5) * 2.0**-52
        assert 0.0 < u < 1.0


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_noise_of_all_ids_equals_the_definition(seed: int, position: int) -> None:
    want = [noise_in_python_ints(seed, position, token_id) for token_id in range(40)]
    np.testing.assert_allclose(gumbel_noise(seed, position, 40), want, rtol=1e-11)


def test_noise_of_an_id_does_not_depend_on_the_vocabulary() -> None:
    assert (gumbel_noise(5, 6, 10) == gumbel_noise(5, 6, 1000)[:10]).all()


# --- distribution ------------------------------------------------------------------------------------------------


def chi_square(counts: Any, probabilities: Any) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


CHI_SQUARE_9_AT_1E_4 = 33.72
"""9 degrees of freedom are above this once in 10,000; the seeds are fixed, so the test never flickers."""


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_picks_over_seeds_follow_the_softmax(temperature: float) -> None:
    scaled = logits_of(3, 10, 1.2).numpy().astype(np.float64) / temperature
    picks = [int((scaled + gumbel_noise(seed, 17, 10)).argmax()) for seed in range(4000)]
    counts = np.bincount(picks, minlength=10)
    assert chi_square(counts, np.exp(scaled) / np.exp(scaled).sum()) < CHI_SQUARE_9_AT_1E_4


def test_picks_over_positions_follow_the_softmax() -> None:
    scaled = logits_of(4, 10, 1.2).numpy().astype(np.float64)
    picks = [int((scaled + gumbel_noise(99, position, 10)).argmax()) for position in range(4000)]
    counts = np.bincount(picks, minlength=10)
    assert chi_square(counts, np.exp(scaled) / np.exp(scaled).sum()) < CHI_SQUARE_9_AT_1E_4


def test_picks_with_cuts_follow_the_softmax_of_what_is_kept() -> None:
    params = SamplingParams(top_k=6, top_p=0.9)
    logits = logits_of(5, 10, 1.2)
    scaled = logits.numpy().astype(np.float64)
    kept = kept_ids(scaled, params)
    counts = np.zeros(10)
    for seed in range(3000):
        counts[pick(logits, SamplingParams(top_k=6, top_p=0.9, seed=seed), NO_HISTORY)] += 1
    assert set(np.flatnonzero(counts)) <= set(kept.tolist())
    assert 1 < len(kept) < 7
    weights = np.exp(scaled[kept])
    assert chi_square(counts[kept], weights / weights.sum()) < CHI_SQUARE_9_AT_1E_4


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of picks of a uniform pair of ids fall evenly into the four cells."""
    for step_seed, step_position in ((0, 1), (1, 0), (1, -1)):
        cells = np.zeros(4)
        for n in range(3000):
            first = gumbel_noise(n * 2, n * 2 + 1, 2).argmax()
            second = gumbel_noise(n * 2 + step_seed, n * 2 + 1 + step_position, 2).argmax()
            cells[2 * first + second] += 1
        assert chi_square(cells, np.full(4, 0.25)) < 21.11  # 3 degrees of freedom at 1e-4


# --- picking -----------------------------------------------------------------------------------------------------


def test_greedy_takes_the_smaller_of_equal_ids_and_ignores_the_cuts() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=1.0, seed=7)
    assert pick(logits, params, NO_HISTORY) == 1


@pytest.mark.parametrize("seed", range(20))
def test_pick_is_the_best_kept_id_with_its_noise(seed: int) -> None:
    params = SamplingParams(temperature=0.8, top_k=5, seed=seed)
    history = History(prompt_ids=[1, 2], output_ids=[3])
    logits = logits_of(seed)
    scores = {
        token_id: float(logits[token_id]) / 0.8 + noise_in_python_ints(seed, 3, token_id)
        for token_id in logits.argsort(descending=True)[:5].tolist()
    }
    assert pick(logits, params, history) == max(scores, key=lambda token_id: scores[token_id])


def test_position_counts_prompt_and_output() -> None:
    assert History(prompt_ids=[1, 2, 3], output_ids=[4]).position == 4


def test_one_kept_id_needs_no_luck() -> None:
    logits = logits_of(1)
    for seed in range(50):
        assert pick(logits, SamplingParams(top_k=1, seed=seed), NO_HISTORY) == logits.argmax()


# --- processing --------------------------------------------------------------------------------------------------


def test_bias_is_added_before_the_penalties() -> None:
    params = SamplingParams(logit_bias=((2, -3.0),), repetition_penalty=2.0)
    out = process_logits(
        torch.tensor([1.0, 1.0, 1.0]), params, History(prompt_ids=[2], output_ids=[])
    )
    assert out.tolist() == [1.0, 1.0, -4.0]


def test_repetition_penalty_sees_prompt_and_output_once_each() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    history = History(prompt_ids=[0, 0, 1], output_ids=[1, 2])
    out = process_logits(torch.tensor([4.0, -4.0, 0.0, 4.0]), params, history)
    assert out.tolist() == [2.0, -8.0, 0.0, 4.0]


def test_presence_and_frequency_see_the_output_alone() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    history = History(prompt_ids=[0, 0], output_ids=[1, 1, 2])
    out = process_logits(torch.zeros(4), params, history)
    assert out.tolist() == [0.0, -1.0, -0.75, 0.0]


def test_penalties_follow_the_repetition_penalty() -> None:
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=2.0)
    out = process_logits(torch.tensor([1.0]), params, History(prompt_ids=[], output_ids=[0]))
    assert out.tolist() == [-0.5]


@pytest.mark.parametrize(("num_output", "banned"), [(0, True), (2, True), (3, False)])
def test_stop_ids_are_banned_while_too_little_is_out(num_output: int, banned: bool) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(1, 2), temperature=0)
    history = History(prompt_ids=[0] * 9, output_ids=[0] * num_output)
    assert pick(torch.tensor([0.0, 5.0, 4.0]), params, history) == (0 if banned else 1)


def test_the_logits_given_are_left_alone() -> None:
    logits = torch.zeros(3)
    process_logits(logits, SamplingParams(logit_bias=((0, 1.0),)), NO_HISTORY)
    assert logits.tolist() == [0.0, 0.0, 0.0]


def kept_by_brute_force(scaled: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    ranked = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k:
        ranked = ranked[:top_k]
    total = math.fsum(math.exp(scaled[i]) for i in ranked)
    probabilities = {i: math.exp(scaled[i]) / total for i in ranked}
    kept: list[int] = []
    for i in ranked:
        if top_p < 1 and math.fsum(probabilities[j] for j in kept) >= top_p:
            break
        kept.append(i)
    return {i for i in kept if probabilities[i] >= min_p * probabilities[ranked[0]]}


@given(
    scaled=st.lists(
        st.sampled_from([-2.5, -1.25, 0.0, 0.3, 0.7, 1.9, 2.2]), min_size=1, max_size=9
    ),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.33, 0.61, 0.87, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.41, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_cuts_equal_brute_force(
    scaled: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_ids(np.array(scaled), params)
    assert set(kept.tolist()) == kept_by_brute_force(scaled, top_k, top_p, min_p)


def test_top_p_renormalises_what_top_k_left() -> None:
    scaled = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert kept_ids(scaled, SamplingParams(top_p=0.55)).tolist() == [0, 1]
    assert kept_ids(scaled, SamplingParams(top_k=2, top_p=0.55)).tolist() == [0]


def test_equal_logits_are_cut_from_the_larger_id() -> None:
    scaled = np.zeros(6)
    assert kept_ids(scaled, SamplingParams(top_k=2)).tolist() == [0, 1]
    assert kept_ids(scaled, SamplingParams(top_p=0.4)).tolist() == [0, 1, 2]


def test_every_row_of_a_window_sees_the_drafts_before_it() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9, 2.8]] * 3)
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    assert pick_window(logits, params, NO_HISTORY, [1, 2]) == [1, 2, 3]


def test_logprobs_come_from_the_unprocessed_logits() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0])
    total = math.log(math.e + 2 * math.exp(3) + 1)
    answer = token_logprobs(logits, 0, 3)
    assert answer.logprob == pytest.approx(1 - total, abs=1e-6)
    assert [token_id for token_id, _ in answer.top] == [1, 2, 0]
    assert answer.top[0][1] == pytest.approx(3 - total, abs=1e-6)
