"""Token-identical output whatever is drafted and whoever else is in the batch (product.md D2, D3)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.interface import SamplingParams
from tests.oracle import tiny
from tests.oracle.driver import GREEDY, Job, generate, generate_alone

if TYPE_CHECKING:
    from tests.oracle.conftest import Models

NAMES = sorted(tiny.GRID)
NUM_TOKENS = 28

SEEDED = SamplingParams(temperature=4.0, seed=20_251_130)
"""Hot: the shared noise decides most picks, so draft and target agree often even in a random model."""

MILD = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=7, presence_penalty=0.5)

SAMPLINGS = {"greedy": GREEDY, "hot": SEEDED, "mild": MILD}


def job(name: str, sampling: str, *, seed: int = 0, length: int = 37, max_draft: int = 0) -> Job:
    prompt = tiny.text(name, seed)[:length]
    return Job(
        prompt=prompt, num_tokens=NUM_TOKENS, sampling=SAMPLINGS[sampling], max_draft=max_draft
    )


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
@pytest.mark.parametrize("name", NAMES)
def test_any_chain_length_gives_the_same_tokens(models: Models, name: str, sampling: str) -> None:
    engine = models.engine(name)
    plain = generate_alone(engine, job(name, sampling))
    assert len(plain) == NUM_TOKENS
    num_accepted = 0
    for max_draft in (1, 2, 3, 4):
        progress = generate(engine, job(name, sampling, max_draft=max_draft))[0]
        assert progress.token_ids == plain
        num_accepted += sum(step.num_accepted for step in progress.steps)
    if sampling == "hot":
        assert num_accepted > NUM_TOKENS


@pytest.mark.parametrize("min_p", [0.005, 0.02, 0.5])
def test_any_gate_gives_the_same_tokens(models: Models, min_p: float) -> None:
    name = NAMES[0]
    engine, plain = models.engine(name), generate_alone(models.engine(name), job(name, "hot"))
    gated = Job(
        prompt=tiny.text(name)[:37],
        num_tokens=NUM_TOKENS,
        sampling=SEEDED,
        max_draft=4,
        min_p=min_p,
    )
    assert generate_alone(engine, gated) == plain


@pytest.mark.parametrize("slot", range(4))
def test_any_slot_gives_the_same_tokens(models: Models, slot: int) -> None:
    name = NAMES[0]
    engine, first = models.engine(name), job(name, "hot", max_draft=3)
    other = Job(prompt=first.prompt, num_tokens=NUM_TOKENS, sampling=SEEDED, max_draft=3, slot=slot)
    assert generate_alone(engine, other) == generate_alone(engine, first)


LENGTHS = (37, 5, 64, 90)
COMPANY = [
    *[(name, 3, stagger) for name in NAMES for stagger in ((0, 0, 0), (1, 4, 7))],
    *[(NAMES[0], company, (0, 6, 2)) for company in (1, 2, 3)],
    *[(NAMES[-1], company, (9, 0, 3)) for company in (1, 2, 3)],
]


@pytest.fixture(scope="module")
def plain_outputs() -> dict[tuple[str, int], list[int]]:
    """What each job of the next test gives alone and without drafts, by model and number of the job."""
    return {}


@pytest.mark.parametrize(("name", "company", "stagger"), COMPANY)
def test_company_changes_nothing(
    models: Models,
    plain_outputs: dict[tuple[str, int], list[int]],
    name: str,
    company: int,
    stagger: tuple[int, int, int],
) -> None:
    """One main job and 1 to 3 others with lengths, chains, samplings and arrivals of their own: all as if alone."""
    engine = models.engine(name)
    kinds, drafts = ("hot", "greedy", "mild", "hot"), (4, 0, 3, 1)
    jobs = [
        Job(
            prompt=tiny.text(name, seed=i)[: LENGTHS[i]],
            num_tokens=NUM_TOKENS - 5 * i,
            sampling=SAMPLINGS[kinds[i]],
            max_draft=drafts[i],
            slot=(i + 1) % 4,
            first_round=0 if i == 0 else stagger[i - 1],
        )
        for i in range(company + 1)
    ]
    together = [progress.token_ids for progress in generate(engine, *jobs)]
    for i, one in enumerate(jobs):
        if (name, i) not in plain_outputs:
            alone = replace(one, slot=0, max_draft=0, first_round=0)
            plain_outputs[name, i] = generate_alone(engine, alone)
        assert together[i] == plain_outputs[name, i]


@pytest.mark.parametrize("max_draft", [0, 4])
def test_a_stop_id_ends_the_sequence_exactly_there(models: Models, max_draft: int) -> None:
    name = NAMES[0]
    engine = models.engine(name)
    plain = generate_alone(engine, job(name, "hot"))
    for at in (1, 6, 7, 8, 9, 20):
        stop = plain[at]
        stopping = SamplingParams(
            temperature=SEEDED.temperature, seed=SEEDED.seed, stop_token_ids=(stop,)
        )
        stopped = Job(
            prompt=tiny.text(name)[:37],
            num_tokens=NUM_TOKENS,
            sampling=stopping,
            max_draft=max_draft,
        )
        assert generate_alone(engine, stopped) == plain[: plain.index(stop) + 1]
