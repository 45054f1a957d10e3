"""Whatever the schedule was, every request gives the tokens of its solo run (product.md D3)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from engine.fake import FakeEngine, FakeFiles, FakeScript
from engine.interface import SamplingParams
from engine.loading import load_engine
from scheduler.config import CacheConfig, SchedulerConfig
from tests.factories import make_request
from tests.oracle import tiny
from tests.oracle.conftest import engine_config
from tests.property.schedules import TURN_ID, Schedule, Seen, Server, Solo, Texts

SCRIPT = FakeScript(
    num_slots=3,
    chunk_tokens=16,
    max_context=512,
    vocab_size=40,
    page_bytes=10,
    checkpoint_bytes=25,
)
TEXTS = Texts(vocab_size=40, system_tokens=70, user_tokens=40, max_tokens=30, max_prompt=400)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("group", range(5))
def test_scripted_tokens_do_not_depend_on_the_schedule(group: int) -> None:
    """Many schedules of many requests, where the engine checks every id and every page it is told to use.

    Some engines hold answers back, as those of several stages do.
    """
    engine = FakeEngine(replace(SCRIPT, num_groups=1 + group % 3))
    solo = Solo(FakeEngine(SCRIPT), SCRIPT)
    seen = Seen()
    for seed in range(6):
        Schedule(engine, TEXTS, Random(1000 * group + seed), solo).run(15, seen)
        assert engine.parked_ids() == (frozenset(), frozenset())
    assert seen.cached > 300
    assert min(seen.cancelled, seen.evictions, seen.preemptions, seen.refused) > 0


def test_a_shared_prompt_is_saved_page_by_page_while_its_slot_flies() -> None:
    engine = FakeEngine(replace(SCRIPT, num_groups=2, max_context=1400))
    solo = Solo(FakeEngine(replace(SCRIPT, max_context=1400)), SCRIPT)
    texts = replace(TEXTS, system_tokens=600, max_prompt=1300)
    for seed in (0, 3):
        schedule = Schedule(engine, texts, Random(seed), solo)
        schedule.server.roster._parking._saves_per_window = 1
        schedule.run(12, Seen())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("group", range(3))
def test_scripted_tokens_do_not_depend_on_what_comes_from_disk(group: int) -> None:
    """Memory holds few conversations; engines die, files are damaged and the disk is full at times."""
    solo = Solo(FakeEngine(SCRIPT), SCRIPT)
    seen = Seen()
    for seed in range(8):
        files = FakeFiles()
        engine = FakeEngine(SCRIPT, files=files)
        schedule = Schedule(engine, TEXTS, Random(5000 + 1000 * group + seed), solo, files)
        schedule.run(20, seen)
    assert min(seen.from_disk, seen.refused_files, seen.restarts) > 0, seen
    assert seen.cached > 300


MODEL_TEXTS = Texts(vocab_size=131, system_tokens=40, user_tokens=12, max_tokens=10, max_prompt=150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Solo:
    """A tiny random model in fp32, and what every request gives alone."""
    checkpoint = tiny.make_checkpoint(tmp_path_factory.mktemp("schedules"), "gqa3_gdn2")
    # Few slots, so that requests wait and are preempted.
    return Solo(load_engine(replace(engine_config(checkpoint), num_slots=2)))


def run_group(model: Solo, group: int) -> None:
    seen = Seen()
    for seed in range(5):
        rng = Random(1000 * group + seed)
        # The compiled step goes on from decoded state by itself; every other group forbids it.
        decoded = None if group % 2 else False
        Schedule(model.engine, MODEL_TEXTS, rng, model, resumes_decoded=decoded).run(4, seen)
    assert seen.requests >= 20


@pytest.mark.timeout(60)
@pytest.mark.parametrize("group", range(10))
def test_a_models_tokens_do_not_depend_on_the_schedule(model: Solo, group: int) -> None:
    run_group(model, group)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("group", range(10, 40))
def test_a_models_tokens_do_not_depend_on_many_more_schedules(model: Solo, group: int) -> None:
    run_group(model, group)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dropped", [0, 2], ids=["thinking_kept", "thinking_dropped"])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.0), SamplingParams(seed=3, presence_penalty=0.5)],
    ids=["greedy", "seeded"],
)
@pytest.mark.parametrize("decoded", [False, None], ids=["exact", "auto"])
def test_every_turn_of_a_parked_conversation_is_as_if_never_parked(
    model: Solo, decoded: bool | None, sampling: SamplingParams, dropped: int
) -> None:
    """Two conversations take turns; each goes on from where its last prompt's answer began, or ended."""
    rng = Random(dropped)
    cache = CacheConfig(min_free_bytes=0, resumes_decoded=decoded)
    config = SchedulerConfig(turn_token_id=TURN_ID, cache=cache)
    server = Server(model.engine, config)
    prompts = [(TURN_ID, *MODEL_TEXTS.words(rng, length)) for length in (5, 70)]
    expected_cached = [0, 0]
    for turn in range(10):
        for i, said in enumerate(prompts):
            prompt = (*said, TURN_ID, *MODEL_TEXTS.words(rng, 3), TURN_ID, TURN_ID + 1)
            request = make_request(prompt_ids=prompt, max_tokens=5)
            asked = server.complete(replace(request, sampling=sampling))
            assert tuple(asked.token_ids) == model.tokens(asked.request, TURN_ID), f"turn {turn}"
            assert asked.usage is not None
            assert asked.usage.cached_tokens == expected_cached[i]
            from_its_end = decoded is None and not dropped
            expected_cached[i] = len(prompt) + (4 if from_its_end else -2)
            prompts[i] = (*prompt, *asked.token_ids[dropped:])
    server.close()
