"""Every pick of the engine against the plain sampler on the plain model's logits, row by row, with drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.interface import SamplingParams
from engine.reference.sampling import History, pick, token_logprobs
from tests.oracle import tiny
from tests.oracle.driver import Job, generate
from tests.oracle.tolerances import LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tests.oracle.conftest import Models

NAME = "gqa3_gdn2"
NUM_TOKENS = 36

OPTIONS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(seed=1),
    "hot": SamplingParams(temperature=4.0, seed=2),
    "largest_seed": SamplingParams(temperature=2.0, seed=2**64 - 1),
    "top_k": SamplingParams(temperature=3.0, top_k=4, seed=3),
    "top_p": SamplingParams(temperature=1.5, top_p=0.4, seed=4),
    "min_p": SamplingParams(temperature=1.2, min_p=0.3, seed=5),
    "all_cuts": SamplingParams(temperature=3.0, top_k=30, top_p=0.8, min_p=0.4, seed=6),
    "presence": SamplingParams(temperature=3.0, presence_penalty=2.0, top_k=12, seed=7),
    "frequency": SamplingParams(temperature=3.0, frequency_penalty=1.5, top_k=12, seed=8),
    "negative": SamplingParams(
        temperature=2.0, presence_penalty=-1.0, frequency_penalty=-0.3, seed=9
    ),
    "repetition": SamplingParams(temperature=1.5, repetition_penalty=1.8, top_k=20, seed=10),
    "greedy_penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "bias": SamplingParams(temperature=2.0, logit_bias=((7, 6.0), (9, 5.0), (11, -100.0)), seed=11),
    "min_tokens": SamplingParams(
        temperature=2.0,
        logit_bias=((tiny.EOS, 8.0), (17, 7.0)),
        stop_token_ids=(tiny.EOS, 17),
        min_tokens=13,
        seed=12,
    ),
    "everything": SamplingParams(
        temperature=2.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias=((5, 1.5), (6, -2.0)),
        stop_token_ids=(8,),
        min_tokens=20,
        seed=13,
    ),
}


def row_logits(models: Models, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Logits of the row that each output token was picked from. [num output, V]."""
    logits, _ = models.reference(NAME).forward([*prompt, *output[:-1]])
    return logits[len(prompt) - 1 :]


@pytest.mark.parametrize("max_draft", [0, 1, 4])
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_picks_equal_the_plain_sampler(models: Models, option: str, max_draft: int) -> None:
    params, prompt = OPTIONS[option], tiny.text(NAME)[:41]
    job = Job(prompt=prompt, num_tokens=NUM_TOKENS, sampling=params, max_draft=max_draft)
    output = generate(models.engine(NAME), job)[0].token_ids
    rows = row_logits(models, prompt, output)
    expected = [
        pick(rows[i], params, History(prompt_ids=prompt, output_ids=output[:i]))
        for i in range(len(output))
    ]
    assert output == expected
    ended = output[-1] in params.stop_token_ids
    assert ended or len(output) == NUM_TOKENS


@pytest.mark.parametrize("option", ["presence", "repetition", "everything", "hot"])
def test_drafts_are_accepted_under_penalties(models: Models, option: str) -> None:
    """Else the test above would prove nothing about rows after drafts."""
    params, prompt = OPTIONS[option], tiny.text(NAME)[:41]
    job = Job(prompt=prompt, num_tokens=NUM_TOKENS, sampling=params, max_draft=4)
    steps = generate(models.engine(NAME), job)[0].steps
    assert sum(step.num_accepted for step in steps) >= 3


def test_slots_keep_their_own_options(models: Models) -> None:
    names = ("everything", "greedy_penalties", "min_tokens", "top_k")
    prompts = [tiny.text(NAME, seed)[: 20 + 11 * seed] for seed in range(4)]
    jobs = [
        Job(
            prompt=prompts[slot],
            num_tokens=NUM_TOKENS,
            sampling=OPTIONS[name],
            max_draft=slot + 1,
            slot=slot,
            first_round=slot,
        )
        for slot, name in enumerate(names)
    ]
    for job, progress in zip(jobs, generate(models.engine(NAME), *jobs), strict=True):
        output = progress.token_ids
        rows = row_logits(models, job.prompt, output)
        for i, token_id in enumerate(output):
            history = History(prompt_ids=job.prompt, output_ids=output[:i])
            assert token_id == pick(rows[i], job.sampling, history)


@pytest.mark.parametrize("max_draft", [0, 4])
@pytest.mark.parametrize("option", ["greedy", "hot", "everything"])
def test_logprobs_are_those_of_the_unprocessed_logits(
    models: Models, option: str, max_draft: int
) -> None:
    params, prompt = replace(OPTIONS[option], top_logprobs=5), tiny.text(NAME)[:41]
    job = Job(prompt=prompt, num_tokens=NUM_TOKENS, sampling=params, max_draft=max_draft)
    progress = generate(models.engine(NAME), job)[0]
    rows = row_logits(models, prompt, progress.token_ids)
    at = 1
    for step in progress.steps:
        assert step.logprobs is not None
        for token_id, answer in zip(step.token_ids, step.logprobs, strict=True):
            expected = token_logprobs(rows[at], token_id, 5)
            assert answer.logprob == pytest.approx(expected.logprob, abs=LOGPROBS)
            assert [i for i, _ in answer.top] == [i for i, _ in expected.top]
            for (_, actual), (_, wanted) in zip(answer.top, expected.top, strict=True):
                assert actual == pytest.approx(wanted, abs=LOGPROBS)
            at += 1
    assert at == len(progress.token_ids)


def test_no_logprobs_unless_asked_for(models: Models) -> None:
    job = Job(prompt=tiny.text(NAME)[:9], num_tokens=4, max_draft=2)
    assert all(step.logprobs is None for step in generate(models.engine(NAME), job)[0].steps)


@pytest.mark.parametrize(
    "penalty",
    [
        SamplingParams(presence_penalty=200.0),
        SamplingParams(frequency_penalty=200.0),
        SamplingParams(repetition_penalty=100.0),
    ],
    ids=["presence", "frequency", "repetition"],
)
@pytest.mark.parametrize("max_draft", [0, 4])
def test_penalties_see_every_token_of_a_chain(
    models: Models, penalty: SamplingParams, max_draft: int
) -> None:
    """Ids of falling bias, each picked once: one that the penalties miss would come again."""
    wanted = list(range(20, 37))
    bias = tuple((token_id, 400.0 - 6 * i) for i, token_id in enumerate(wanted))
    sampling = replace(penalty, temperature=0.0, logit_bias=bias)
    prompt = [5, 6, 7]
    run = generate(
        models.engine(NAME),
        Job(prompt=prompt, num_tokens=16, sampling=sampling, max_draft=max_draft),
    )[0]
    assert run.token_ids == wanted[:16]
    assert [step.num_accepted for step in run.steps] == ([4, 4, 4] if max_draft else [0] * 15)
