"""The served engine with the Triton kernels: texts that depend on nothing but themselves, plan, and hidden costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from engine.config import EngineConfig
from engine.cuda.backend import CudaTrunk
from engine.cuda.tiers import hits_ready
from engine.engine import TorchEngine
from engine.errors import ConfigMismatch, PlanRefused
from engine.expert_profile import profile_of_counts, write_profile
from engine.instruments import count_allocations
from engine.interface import (
    PAGE_TOKENS,
    DecodeStep,
    PrefillChunk,
    Resume,
    SamplingParams,
    SavePage,
    SlotStart,
    Suspend,
    WindowPlan,
)
from engine.loading import load_engine
from engine.tools.profile import count_routes
from tests.gpu.conversing import parking_changes_no_text

if TYPE_CHECKING:
    from engine.cuda.step import CudaStep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CONFIG = EngineConfig(device="cuda", max_context=1024, chunk_tokens=128, threads=2)
NUM_IDS = 24
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0, seed=11),
    "nucleus": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=12),
    "torch picks": SamplingParams(temperature=0.9, top_p=0.8, seed=13),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.2, seed=14),
}


@pytest.fixture(scope="module", params=["bf16", "int8"])
def engine(request: pytest.FixtureRequest) -> TorchEngine:
    return load_engine(replace(CONFIG, kernels="compiled", kv=request.param), rehearse=True)


def text(num_tokens: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 8000, (num_tokens,), generator=generator).tolist())


def read(engine: TorchEngine, slot: int, ids: tuple[int, ...], sampling: SamplingParams) -> int:
    """Read a prompt in the engine's own chunks; the first output token."""
    size = engine.info.chunk_tokens
    starts = (SlotStart(slot=slot, sampling=sampling),)
    token_id = -1
    for first in range(0, len(ids), size):
        part = ids[first : first + size]
        is_last = first + size >= len(ids)
        chunk = PrefillChunk(slot=slot, start=first, token_ids=part, is_last=is_last)
        result = engine.run_window(WindowPlan(starts=starts, chunks=(chunk,)))
        assert not result.failures
        starts = ()
        if is_last:
            (token_id,) = result.tokens[0].token_ids
    return token_id


def decode(
    engine: TorchEngine, slots: tuple[int, ...], max_draft: int, num_ids: int = NUM_IDS
) -> dict[int, list[int]]:
    """Windows of all these slots together until each has so many ids."""
    found: dict[int, list[int]] = {slot: [] for slot in slots}
    while any(len(ids) < num_ids for ids in found.values()):
        steps = tuple(DecodeStep(slot=s, max_draft=max_draft, spec_min_p=0.2) for s in slots)
        result = engine.run_window(WindowPlan(decodes=steps))
        assert not result.failures
        for tokens in result.tokens:
            found[tokens.slot].extend(tokens.token_ids)
    return {slot: ids[:num_ids] for slot, ids in found.items()}


@pytest.mark.parametrize("kind", SAMPLING)
def test_a_text_is_the_same_alone_in_company_and_with_drafts(
    engine: TorchEngine, kind: str
) -> None:
    ids, sampling = text(150, 1), SAMPLING[kind]
    expected = [read(engine, 0, ids, sampling), *decode(engine, (0,), 0)[0]]
    for max_draft in (1, 4):
        found = [read(engine, 2, ids, sampling), *decode(engine, (2,), max_draft)[2]]
        assert found == expected
    for max_draft in (0, 4):
        first = read(engine, 1, ids, sampling)
        for slot, other in zip((0, 2, 3), SAMPLING.values(), strict=False):
            read(engine, slot, text(40 + 90 * slot, slot), other)
        assert [first, *decode(engine, (0, 1, 2, 3), max_draft)[1]] == expected


def test_a_text_is_the_same_when_it_was_parked_and_restored_into_another_slot(
    engine: TorchEngine,
) -> None:
    sampling = SAMPLING["sampled"]
    ids = text(300, 3)
    expected = [read(engine, 0, ids, sampling), *decode(engine, (0,), 4)[0]]
    known = [read(engine, 0, ids, sampling), *decode(engine, (0,), 4, 7)[0]]
    # A window may have given more than was asked for; what is parked is all of it.
    known = list(engine.sequence_ids(0)[len(ids) :])
    pages = -(-(len(ids) + len(known)) // PAGE_TOKENS)
    saves = tuple(SavePage(slot=0, page_id=i, index=i) for i in range(pages))
    read(engine, 1, text(200, 5), sampling)
    beside = DecodeStep(slot=1, max_draft=4, spec_min_p=0.0)
    suspend = Suspend(slot=0, checkpoint_id=0)
    engine.run_window(WindowPlan(suspends=(suspend,), saves=saves, decodes=(beside,)))
    read(engine, 0, text(300, 4), sampling)
    resume = Resume(
        checkpoint_id=0,
        page_ids=tuple(range(pages)),
        token_ids=(*ids, *known),
        num_output=len(known),
    )
    start = SlotStart(slot=3, sampling=sampling, resume=resume)
    engine.run_window(WindowPlan(starts=(start,), decodes=(beside,)))
    rest = decode(engine, (0, 1, 3), 4, len(expected))[3]
    assert [*known, *rest][: len(expected)] == expected
    engine.run_window(WindowPlan(drop_page_ids=tuple(range(pages)), drop_checkpoint_ids=(0,)))


def test_the_scheduler_parks_and_restores_beside_running_windows() -> None:
    """Follow-ups read the last answer again, so that parked or not their texts are the same."""
    engine = load_engine(replace(CONFIG, num_slots=2))
    parking_changes_no_text(engine)


def test_a_slot_whose_logits_are_not_finite_fails_alone(engine: TorchEngine) -> None:
    sampling = SAMPLING["greedy"]
    ids = text(60, 8)
    expected = [read(engine, 0, ids, sampling), *decode(engine, (0,), 0)[0]]
    found = [read(engine, 0, ids, sampling)]
    read(engine, 1, ids, sampling)
    engine.state.s[0, 1, 0, 0, 0] = float("nan")
    steps = tuple(DecodeStep(slot=s, max_draft=0, spec_min_p=0.5) for s in (0, 1))
    result = engine.run_window(WindowPlan(decodes=steps))
    assert [failure.slot for failure in result.failures] == [1]
    found += [i for tokens in result.tokens for i in tokens.token_ids]
    assert [*found, *decode(engine, (0,), 0)[0]][: len(expected)] == expected


def test_planned_memory_is_what_the_device_gives(engine: TorchEngine) -> None:
    held = [item for item in engine.info.memory_plan if item.actual_bytes is not None]
    assert {"experts, 4 bits", "step buffers", "session s"} <= {item.name for item in held}
    assert all(item.planned_bytes == item.actual_bytes for item in held)
    assert engine.info.dtype == "bfloat16"
    assert "4 bits" in engine.info.kernels
    assert not engine.info.reads_as_decodes


def test_a_steady_window_takes_no_device_memory_and_waits_only_for_its_results(
    engine: TorchEngine,
) -> None:
    steady(engine)


@pytest.mark.parametrize("ple_io", ["mmap", "direct"])
def test_a_table_on_the_disk_gives_the_same_bits_and_costs_no_wait(
    engine: TorchEngine, ple_io: str
) -> None:
    kv = "int8" if engine.info.kv_dtype == "int8" else "bf16"
    stored = load_engine(replace(CONFIG, kernels="compiled", kv=kv, ple_io=ple_io), rehearse=True)
    assert "ple table" not in {item.name for item in stored.info.memory_plan}
    prompt, rows = text(200, 3), {0: text(5, 4)}
    expected, found = (
        torch.cat((one.prefill_logits(0, prompt, 0), one.verify_logits(rows)[0]))
        for one in (engine, stored)
    )
    assert torch.equal(found, expected)
    stored.commit({0: 2})
    steady(stored)


def steady(engine: TorchEngine) -> None:
    """Four slots' windows with chains take no device memory and wait for what is read alone."""
    for slot in range(4):
        read(engine, slot, text(100, slot), SAMPLING["sampled"])
    steps = tuple(DecodeStep(slot=s, max_draft=4, spec_min_p=0.0) for s in range(4))

    def window() -> None:
        assert not engine.run_window(WindowPlan(decodes=steps)).failures

    for _ in range(3):
        window()
    assert count_allocations(window).device_calls == 0
    waits = count_waits(window)
    # The drafts, whose number is the window's; and the picks.
    assert waits == 2


def count_waits(work: object) -> int:
    """How often torch waits for the device while `work` runs."""
    assert callable(work)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as found:
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in found)


NUM_EXPERTS, NUM_LAYERS, NUM_ACTIVE = 32, 8, 4
"""Of the default model."""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ranks every pair: other experts than the first, and not equally many in each layer."""
    path = tmp_path_factory.mktemp("profile") / "expert-profile.bin"
    layers, experts = range(NUM_LAYERS), range(NUM_EXPERTS)
    write_profile(path, profile_of_counts([[x * e % 13 for e in experts] for x in layers]))
    return str(path)


@pytest.fixture(scope="module")
def untiered() -> dict[str, list[int]]:
    engine = load_engine(CONFIG)
    return texts(engine)


def texts(engine: TorchEngine) -> dict[str, list[int]]:
    """A greedy and a sampled text behind a prompt of three pieces, with drafts, in company."""
    firsts = {
        name: read(engine, slot, text(300 + slot, 20 + slot), SAMPLING[name])
        for slot, name in enumerate(("greedy", "sampled"))
    }
    found = decode(engine, (0, 1), 4)
    return {name: [first, *found[i]] for i, (name, first) in enumerate(firsts.items())}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ranked", [False, True], ids=["first", "profile"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_tiers_change_no_token_and_no_hidden_cost(
    share: float, ranked: bool, workers: int, profile: str, untiered: dict[str, list[int]]
) -> None:
    num_slots = int(share * NUM_LAYERS * NUM_EXPERTS)
    tiered = replace(
        CONFIG,
        kernels="compiled",
        expert_cache=num_slots,
        expert_profile=profile if ranked else None,
        pool_workers=workers,
    )
    engine = load_engine(tiered, rehearse=True)
    before = near(engine)
    assert texts(engine) == untiered
    moves = not ranked and 0 < share < 1
    assert (step_of(engine).first_come is not None) == moves == (near(engine) != before)
    items = {i.name: i for i in engine.info.memory_plan if i.actual_bytes is not None}
    assert {n: i.planned_bytes for n, i in items.items()} == {
        n: i.actual_bytes for n, i in items.items()
    }
    one, two = items["experts, tier one"].planned_bytes, items["experts, tier two"].planned_bytes
    assert one * (NUM_LAYERS * NUM_EXPERTS - num_slots) == two * num_slots
    assert "experts, 4 bits" not in items
    assert ("experts' pool" in items) == (workers > 0 and share < 1)
    assert ("experts' routes" in items) == moves
    steps = tuple(DecodeStep(slot=s, max_draft=4, spec_min_p=0.0) for s in (0, 1))

    def window() -> None:
        assert not engine.run_window(WindowPlan(decodes=steps)).failures

    window()
    assert count_allocations(window).device_calls == 0
    assert count_waits(window) == 2


def step_of(engine: TorchEngine) -> CudaStep:
    trunk = engine.steps
    assert isinstance(trunk, CudaTrunk)
    return trunk.step


def near(engine: TorchEngine) -> list[set[int]]:
    """Experts in slots of each layer, whose tables must be whole."""
    layers = [layer.moe for layer in step_of(engine).model.layers]
    assert hits_ready((x.gate_up, x.down, x.far) for x in layers)
    orders = [x.far.order.tolist() for x in layers if x.far is not None]
    return [{e for e, place in enumerate(order) if place < 0} for order in orders]


@pytest.mark.parametrize("workers", [0, 3])
def test_experts_that_come_first_take_slots_between_windows_and_nobody_waits(
    workers: int, untiered: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time, so that texts are made before, between and behind trades."""
    monkeypatch.setattr("engine.cuda.first_come.TRADED_BYTES", 1)
    num_slots = NUM_LAYERS * NUM_EXPERTS // 2
    tiered = replace(CONFIG, kernels="compiled", expert_cache=num_slots, pool_workers=workers)
    engine = load_engine(tiered)
    first_come, before = step_of(engine).first_come, near(engine)
    assert first_come is not None
    assert first_come.claims.num_unclaimed == num_slots
    read(engine, 0, text(100, 0), SAMPLING["sampled"])
    steps = (DecodeStep(slot=0, max_draft=4, spec_min_p=0.0),)

    def window() -> None:
        assert not engine.run_window(WindowPlan(decodes=steps)).failures

    window()
    window()
    assert 0 < first_come.claims.num_unclaimed < num_slots
    assert count_allocations(window).device_calls == 0
    assert count_waits(window) == 2
    for _ in range(3):
        assert texts(engine) == untiered
    assert near(engine) != before
    assert [len(experts) for experts in near(engine)] == [NUM_EXPERTS // 2] * NUM_LAYERS


def test_a_model_that_does_not_fit_starts_with_what_does(
    untiered: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that lacks the memory of half of the experts."""
    items = load_engine(CONFIG).info.memory_plan
    planned = {item.name: item.planned_bytes for item in items}
    budget = sum(planned.values()) - planned["ple table"] - planned["experts, 4 bits"] // 2
    before = torch.cuda.memory_allocated()

    def free_bytes(device: torch.device) -> int:
        taken = torch.cuda.memory_allocated() - before
        # Planned anew for every engine, but taken once a process.
        return budget - taken - (planned.get("library workspace", 0) if taken else 0)

    monkeypatch.setattr("engine.loading.free_bytes", free_bytes)
    engine = load_engine(replace(CONFIG, vram_reserve_mib=0), rehearse=True)
    held = {item.name: item for item in engine.info.memory_plan}
    one, two = held["experts, tier one"], held["experts, tier two"]
    assert 0 < one.planned_bytes < planned["experts, 4 bits"] / 2
    assert one.planned_bytes + two.planned_bytes == planned["experts, 4 bits"]
    assert (one.planned_bytes, two.planned_bytes) == (one.actual_bytes, two.actual_bytes)
    assert texts(engine) == untiered


def test_more_slots_than_there_are_experts_are_refused() -> None:
    total = NUM_LAYERS * NUM_EXPERTS
    with pytest.raises(PlanRefused, match=f"--expert-cache {total + 1}: there are {total} pairs"):
        load_engine(replace(CONFIG, expert_cache=total + 1))


def test_the_kernels_count_their_routes_wherever_the_experts_lie() -> None:
    ids = [list(text(300, 3)), list(text(5, 4))]
    found = [
        count_routes(load_engine(replace(CONFIG, expert_cache=size)), ids) for size in (None, 20)
    ]
    assert found[0] == found[1]
    assert [sum(layer) for layer in found[0]] == [305 * NUM_ACTIVE] * NUM_LAYERS


def test_what_the_kernels_cannot_do_is_refused_when_asked_for_and_left_to_torch_otherwise() -> None:
    for changes, reason in (
        ({"dtype": "float32"}, "it computes in bfloat16, not in float32"),
        ({"kv": "fp32"}, "not in fp32"),
    ):
        wanted = replace(CONFIG, **changes)
        with pytest.raises(ConfigMismatch, match=reason):
            load_engine(replace(wanted, kernels="compiled"))
        assert load_engine(wanted).info.kernels.startswith("torch layers")
