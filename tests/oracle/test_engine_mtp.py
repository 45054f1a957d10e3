"""The engine's draft chains against the plain draft layer, over windows that accept and reject."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.interface import DecodeStep, SamplingParams
from engine.reference.mtp import DraftStep, draft_chain, greedy_pick
from engine.reference.sampling import History, pick, pick_probability
from tests.oracle import tiny
from tests.oracle.driver import GREEDY, Job, generate
from tests.oracle.tolerances import DRAFT_PROBABILITY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.reference.mtp import DraftPick
    from tests.oracle.conftest import Models
    from tests.oracle.driver import Progress

NAMES = sorted(tiny.GRID)
NUM_TOKENS = 26

HOT = SamplingParams(temperature=2.5, seed=99)
"""The shared noise decides most picks, so chains are accepted to any depth, and still fail now and then."""


def picker(params: SamplingParams) -> DraftPick:
    """How the draft layer picks: as the target would, from its own logits and with the same noise."""
    if params.temperature == 0:
        return greedy_pick

    def noisy(logits: Tensor, position: int) -> int:
        return pick(logits, params, History(prompt_ids=range(position), output_ids=()))

    return noisy


def probability(step: DraftStep, params: SamplingParams, position: int) -> float:
    """What the gate compares, of one drafted token."""
    history = History(prompt_ids=range(position), output_ids=())
    return pick_probability(step.logits, params, history, step.token_id)


def check_acceptance(models: Models, name: str, progress: Progress) -> list[int]:
    """Every window of a job drafted and accepted what the plain chain would have. Returns the accept counts."""
    job, at = progress.job, 1
    model = models.reference(name)
    # The trunk is causal: the streams of every window's committed tokens are a prefix of these.
    _, streams = model.forward([*job.prompt, *progress.token_ids])
    counts: list[int] = []
    for step in progress.steps:
        committed = [*job.prompt, *progress.token_ids[:at]]
        longest = job.draft_length(at)
        chain = draft_chain(
            model, committed, streams[: len(committed) - 1], longest, picker(job.sampling)
        )
        chances = [probability(s, job.sampling, len(committed) + j) for j, s in enumerate(chain)]
        gate = next((j for j, p in enumerate(chances) if p < job.min_p), longest)
        drafts = [s.token_id for s in chain[:gate]]
        expected = num_equal(drafts, progress.token_ids[at:])
        assert (step.num_drafted, step.num_accepted) == (gate, expected)
        assert len(step.token_ids) == expected + 1
        counts.append(expected)
        at += len(step.token_ids)
    return counts


def num_equal(drafts: Sequence[int], following: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(drafts, following, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts))


@pytest.mark.parametrize("length", [1, 14, 50])
@pytest.mark.parametrize("name", NAMES)
def test_chains_of_a_hot_sequence(models: Models, name: str, length: int) -> None:
    """Prompt cells, catch-up cells and chain cells, within and beyond the budget."""
    job = Job(prompt=tiny.text(name)[:length], num_tokens=NUM_TOKENS, sampling=HOT, max_draft=4)
    counts = check_acceptance(models, name, generate(models.engine(name), job)[0])
    assert len(set(counts)) > 1


@pytest.mark.parametrize("max_draft", [1, 2, 3])
def test_shorter_chains(models: Models, max_draft: int) -> None:
    name = NAMES[0]
    job = Job(
        prompt=tiny.text(name, 1)[:50], num_tokens=NUM_TOKENS, sampling=HOT, max_draft=max_draft
    )
    check_acceptance(models, name, generate(models.engine(name), job)[0])


@pytest.mark.parametrize("name", NAMES)
def test_greedy_chains(models: Models, name: str) -> None:
    job = Job(prompt=tiny.text(name)[:40], num_tokens=NUM_TOKENS, sampling=GREEDY, max_draft=4)
    check_acceptance(models, name, generate(models.engine(name), job)[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_gate_ends_a_chain_before_its_first_unlikely_draft(models: Models, name: str) -> None:
    job = Job(
        prompt=tiny.text(name)[:40],
        num_tokens=NUM_TOKENS,
        sampling=GREEDY,
        max_draft=4,
        min_p=6 / tiny.GRID[name].config().vocab_size,
    )
    progress = generate(models.engine(name), job)[0]
    check_acceptance(models, name, progress)
    assert len({step.num_drafted for step in progress.steps}) > 1


@pytest.mark.parametrize("name", NAMES)
def test_chains_in_company(models: Models, name: str) -> None:
    jobs = [
        Job(
            prompt=tiny.text(name, slot)[: 7 + 19 * slot],
            num_tokens=NUM_TOKENS - 3 * slot,
            sampling=SamplingParams(temperature=2.5, seed=slot),
            max_draft=4 - slot,
            slot=slot,
            first_round=2 * slot,
        )
        for slot in range(4)
    ]
    for progress in generate(models.engine(name), *jobs):
        check_acceptance(models, name, progress)


@pytest.mark.parametrize("name", NAMES)
def test_windows_without_drafts_keep_the_cells_of_the_draft_layer(
    models: Models, name: str
) -> None:
    """A sequence that decodes plainly for a while and drafts later has all its cells by then."""
    job = Job(
        prompt=tiny.text(name)[:21], num_tokens=NUM_TOKENS, sampling=HOT, max_draft=4, draft_from=12
    )
    counts = check_acceptance(models, name, generate(models.engine(name), job)[0])
    assert len(set(counts)) > 1


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("name", NAMES)
def test_ids_and_probabilities_of_the_next_chain(
    models: Models, name: str, sampling: SamplingParams
) -> None:
    """After windows that accepted and rejected, in two slots of different lengths at once."""
    engine, model = models.engine(name), models.reference(name)
    jobs = [
        Job(
            prompt=tiny.text(name, slot)[: 10 + 45 * slot],
            num_tokens=20 - 7 * slot,
            sampling=sampling,
            max_draft=3,
            slot=slot,
        )
        for slot in (0, 1)
    ]
    all_progress = generate(engine, *jobs)
    steps = [DecodeStep(slot=slot, max_draft=4, spec_min_p=0.0) for slot in (0, 1)]
    chains = engine.draft(steps)
    for slot, progress in enumerate(all_progress):
        committed = [*progress.job.prompt, *progress.token_ids]
        _, streams = model.forward(committed[:-1])
        expected = draft_chain(model, committed, streams, 4, picker(sampling))
        assert [d.token_id for d in chains[slot]] == [s.token_id for s in expected]
        for j, (draft, step) in enumerate(zip(chains[slot], expected, strict=True)):
            chance = probability(step, sampling, len(committed) + j)
            assert draft.probability == pytest.approx(chance, abs=DRAFT_PROBABILITY)
