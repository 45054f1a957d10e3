"""The engine's picker and acceptance rule against the plain ones, on made-up logits with many ties."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import acceptance, sampling
from engine.interface import SamplingParams
from engine.native.pick import NativePicker
from engine.reference import acceptance as plain_acceptance
from engine.reference import sampling as plain

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 29
LIMIT = 26
"""Ids from here on have no text."""


@st.composite
def all_params(draw: st.DrawFn) -> SamplingParams:
    bias = draw(
        st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-3.0, 0.5, 2.0]), max_size=3)
    )
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 10, 40])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.93, 0.41])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.07, 0.6])),
        seed=draw(st.integers(0, 2**64 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=tuple(bias.items()),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=2))),
        min_tokens=draw(st.sampled_from([0, 4])),
    )


ids = st.lists(st.integers(0, LIMIT - 1), max_size=6)


@st.composite
def windows(draw: st.DrawFn) -> tuple[SamplingParams, list[int], list[int], list[int]]:
    """Parameters, prompt, output and drafts of one slot."""
    return draw(all_params()), [0, *draw(ids)], draw(ids), draw(st.lists(ids.map(len), max_size=4))


def pick_rows(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], drafts: Sequence[int]
) -> list[sampling.PickRow]:
    history = None
    if sampling.TokenHistory.needed(params):
        history = sampling.TokenHistory.empty(VOCAB, torch.device("cpu"))
        history.add_prompt(prompt)
        if output:
            history.add_output(output)
    return [
        sampling.PickRow(
            params=params,
            position=len(prompt) + len(output) + row,
            num_output=len(output) + row,
            history=history,
            drafts=tuple(drafts[:row]),
        )
        for row in range(len(drafts) + 1)
    ]


@pytest.mark.parametrize(
    "picker", [sampling.Picker(LIMIT), NativePicker(LIMIT, VOCAB)], ids=["torch", "compiled"]
)
@given(slots=st.lists(windows(), min_size=1, max_size=4), data_seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_picks_of_a_batch(
    picker: sampling.RowPicker,
    slots: list[tuple[SamplingParams, list[int], list[int], list[int]]],
    data_seed: int,
) -> None:
    generator = torch.Generator().manual_seed(data_seed)
    rows: list[sampling.PickRow] = []
    logits: list[torch.Tensor] = []
    expected: list[int] = []
    chances: list[float] = []
    for params, prompt, output, drafts in slots:
        # Multiples of 1/2: many ids share a logit, so every rule about equal ones is met.
        block = (torch.randn(len(drafts) + 1, VOCAB, generator=generator) * 4).round() / 2
        rows += pick_rows(params, prompt, output, drafts)
        logits.append(block)
        limited = block.clone()
        limited[:, LIMIT:] = -np.inf
        history = plain.History(prompt_ids=prompt, output_ids=output)
        picks = plain.pick_window(limited, params, history, drafts)
        expected += picks
        for row, token_id in enumerate(picks):
            seen = plain.History(prompt_ids=prompt, output_ids=[*output, *drafts[:row]])
            chances.append(plain.pick_probability(limited[row], params, seen, token_id))
    given_logits = torch.cat(logits)
    before = given_logits.clone()
    found = picker.pick(given_logits, rows)
    assert found.ids == expected
    assert found.probabilities == pytest.approx(chances, abs=1e-5)
    assert torch.equal(given_logits, before)


def test_noise_is_the_contract() -> None:
    for seed, position in ((0, 0), (1, 7), (2**64 - 1, 262_143), (2**63, 12_345)):
        row = sampling.PickRow(
            params=SamplingParams(seed=seed), position=position, num_output=0, history=None
        )
        noise = sampling.gumbel_noise([row], torch.arange(5000)[None])[0].numpy()
        np.testing.assert_allclose(noise, plain.gumbel_noise(seed, position, 5000), rtol=1e-12)


def test_logprobs() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    for num_top in (0, 1, 5, 20):
        answer, expected = (
            f(logits, 3, num_top) for f in (sampling.row_logprobs, plain.token_logprobs)
        )
        assert answer.logprob == expected.logprob
        assert answer.top == expected.top


def test_acceptance_of_every_small_case() -> None:
    stops = frozenset({2})
    for drafts in itertools.product((0, 1, 2), repeat=3):
        for picks in itertools.product((0, 1, 2), repeat=4):
            answer = acceptance.accept(picks, drafts, stops)
            expected = plain_acceptance.accept(drafts, picks, stops)
            assert answer.token_ids == expected.token_ids
            assert answer.num_accepted == expected.num_accepted
