"""product.md D3 on the shipped model: alone, in company, drafts on or off, the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.config import EngineConfig
from engine.engine import TorchEngine
from engine.interface import SamplingParams
from engine.loading import load_engine
from tests.oracle.driver import Job, generate, generate_alone

NUM_TOKENS = 16
SUBJECTS = (
    "the sea", "a cat", "bread", "winter", "music", "the moon", "a long train ride", "chess",
    "gardens", "an old house", "coffee", "numbers", "rain",
)  # fmt: skip
REQUESTS = (
    "Tell me about {}.",
    "Write a short poem on {}, please.",
    "What should I know before I learn about {}? Give three points.",
    "Explain {} to a child.",
)
PROMPTS = [request.format(subject) for subject in SUBJECTS for request in REQUESTS]
GROUP = 4


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return load_engine(EngineConfig(device="cpu", threads=1, max_context=512))


@pytest.fixture(scope="module")
def prompt_ids() -> list[list[int]]:
    from tokenizers import Tokenizer

    from engine.config import model_path

    tokenizer = Tokenizer.from_file(str(model_path("default") / "tokenizer.json"))
    turns = (f"<|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n" for p in PROMPTS)
    return [tokenizer.encode(turn).ids for turn in turns]


def test_there_are_at_least_fifty_prompts() -> None:
    assert len(PROMPTS) >= 50


@pytest.mark.parametrize("group", range(len(PROMPTS) // GROUP))
def test_tokens_do_not_depend_on_company_or_drafts(
    engine: TorchEngine, prompt_ids: list[list[int]], group: int
) -> None:
    """Greedy and seeded prompts in turn; company of other lengths, depths and starts."""
    prompts = prompt_ids[group * GROUP : (group + 1) * GROUP]
    sampling = [_sampling(group, i) for i in range(GROUP)]
    jobs = [_job(p, s, slot=i) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]
    alone = [generate_alone(engine, _drafting(job, 0)) for job in jobs]
    assert [generate_alone(engine, _drafting(job, 4)) for job in jobs] == alone
    company = [_drafting(job, depth) for job, depth in zip(jobs, (4, 0, 2, 3), strict=True)]
    assert [p.token_ids for p in generate(engine, *company)] == alone
    assert all(len(ids) == NUM_TOKENS for ids in alone)


def _sampling(group: int, index: int) -> SamplingParams:
    if index % 2 == 0:
        return SamplingParams(temperature=0.0)
    return SamplingParams(
        temperature=0.8, top_p=0.95, top_k=20 if group % 2 else 0, seed=1000 * group + index
    )


def _job(prompt: Sequence[int], sampling: SamplingParams, slot: int) -> Job:
    return Job(prompt=prompt, num_tokens=NUM_TOKENS, sampling=sampling, slot=slot, first_round=slot)


def _drafting(job: Job, max_draft: int) -> Job:
    return Job(
        prompt=job.prompt,
        num_tokens=job.num_tokens,
        sampling=job.sampling,
        slot=job.slot,
        first_round=job.first_round,
        max_draft=max_draft,
        min_p=0.3,
    )
