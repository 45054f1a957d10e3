"""The torch layers on a CUDA device: equal to the CPU within rounding, exact where the CPU is exact by construction."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import TorchEngine
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
from tests.gpu.conversing import parking_changes_no_text

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NUM_THREADS = 2
"""Of the CPU's engine: tests run beside each other."""

GREEDY = SamplingParams(temperature=0.0)
LOGITS = 2e-3
"""fp32 logits of about 3 (standard deviation), tf32 off: sums in other orders on the two devices."""


def load(device: str, dtype: str = "float32") -> TorchEngine:
    return load_engine(
        EngineConfig(
            device=device, dtype=dtype, max_context=1024, kernels="torch", threads=NUM_THREADS
        )
    )


@pytest.fixture(scope="module")
def cuda() -> TorchEngine:
    return load("cuda")


@pytest.fixture(scope="module")
def cpu() -> TorchEngine:
    config = EngineConfig(device="cpu", dtype="float32", max_context=1024, threads=NUM_THREADS)
    return load_engine(config)


def text(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8000, (num_tokens,), generator=generator).tolist()


def read(engine: TorchEngine, slot: int, ids: list[int]) -> list[int]:
    """Read a prompt in one piece; the first output token."""
    chunk = PrefillChunk(slot=slot, start=0, token_ids=tuple(ids), is_last=True)
    start = SlotStart(slot=slot, sampling=GREEDY)
    result = engine.run_window(WindowPlan(starts=(start,), chunks=(chunk,)))
    return list(result.tokens[0].token_ids)


def decode(engine: TorchEngine, slot: int, count: int, max_draft: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        step = DecodeStep(slot=slot, max_draft=max_draft, spec_min_p=0.3)
        ids.extend(engine.run_window(WindowPlan(decodes=(step,))).tokens[0].token_ids)
    return ids[:count]


@pytest.mark.parametrize("length", [1, 63, 130, 700])
def test_prompt_logits_equal_the_cpus(cuda: TorchEngine, cpu: TorchEngine, length: int) -> None:
    ids = text(length, length)
    expected = cpu.prefill_logits(0, ids, 0)
    assert torch.allclose(cuda.prefill_logits(0, ids, 0).cpu(), expected, atol=LOGITS)


def test_windows_and_rollback_equal_the_cpus(cuda: TorchEngine, cpu: TorchEngine) -> None:
    ids = text(560, 5)
    for engine in (cuda, cpu):
        engine.prefill_logits(0, ids[:520], 0)
        engine.prefill_logits(1, ids[:30], 0)
    at = {0: 520, 1: 30}
    for kept in (1, 3, 5, 2):
        rows = {slot: tuple(ids[at[slot] : at[slot] + 5]) for slot in at}
        expected = cpu.verify_logits(rows)
        found = cuda.verify_logits(rows)
        for slot in at:
            assert torch.allclose(found[slot].cpu(), expected[slot], atol=LOGITS)
            at[slot] += kept
        for engine in (cuda, cpu):
            engine.commit(dict.fromkeys(at, kept))


def test_greedy_text_equals_the_cpus_with_drafts_and_without(
    cuda: TorchEngine, cpu: TorchEngine
) -> None:
    ids = text(40, 9)
    expected = [*read(cpu, 0, ids), *decode(cpu, 0, 20, 0)]
    for max_draft in (0, 4):
        assert [*read(cuda, 0, ids), *decode(cuda, 0, 20, max_draft)] == expected


def test_parked_in_pinned_memory_and_restored(cuda: TorchEngine) -> None:
    ids = text(100, 3)
    expected = [*read(cuda, 0, ids), *decode(cuda, 0, 12, 0)]
    known = [*read(cuda, 0, ids), *decode(cuda, 0, 4, 0)]
    pages = -(-(len(ids) + len(known)) // PAGE_TOKENS)
    saves = tuple(SavePage(slot=0, page_id=i, index=i) for i in range(pages))
    cuda.run_window(WindowPlan(suspends=(Suspend(slot=0, checkpoint_id=0),), saves=saves))
    read(cuda, 0, text(300, 4))
    resume = Resume(
        checkpoint_id=0,
        page_ids=tuple(range(pages)),
        token_ids=(*ids, *known),
        num_output=len(known),
    )
    start = SlotStart(slot=2, sampling=GREEDY, resume=resume)
    cuda.run_window(WindowPlan(starts=(start,)))
    assert [*known, *decode(cuda, 2, 8, 0)] == expected
    cuda.run_window(WindowPlan(drop_page_ids=tuple(range(pages)), drop_checkpoint_ids=(0,)))


def test_the_scheduler_parks_and_restores_beside_running_windows() -> None:
    """Copies on their own stream, from and to pinned memory, while other slots decode."""
    config = EngineConfig(
        device="cuda", dtype="float32", max_context=1024, num_slots=2, threads=NUM_THREADS
    )
    engine = load_engine(config)
    parking_changes_no_text(engine)
    slabs = engine._parked._arena._slabs
    assert slabs and all(slab.is_pinned() for slab in slabs)


def test_tiers_of_the_torch_layers_change_no_token() -> None:
    """Experts of the host's memory are fetched and computed where the others are; first come, none, some and all."""
    ids = text(200, 17)
    found: list[list[int]] = []
    for num_slots in (0, 40, 256):
        engine = load_engine(
            EngineConfig(
                device="cuda",
                dtype="float32",
                max_context=1024,
                kernels="torch",
                threads=NUM_THREADS,
                expert_cache=num_slots,
            )
        )
        found.append([*read(engine, 0, ids), *decode(engine, 0, 24, 4)])
        held = [item for item in engine.info.memory_plan if item.actual_bytes is not None]
        assert all(item.planned_bytes == item.actual_bytes for item in held)
        step = WindowPlan(decodes=(DecodeStep(slot=0, max_draft=4, spec_min_p=0.0),))
        engine.run_window(step)
        assert count_allocations(lambda e=engine, w=step: e.run_window(w)).device_calls == 0
        engine.close()
    assert found[1:] == found[:1] * 2


def test_bf16_runs_and_stays_near(cpu: TorchEngine) -> None:
    engine = load("cuda", "bfloat16")
    ids = text(200, 7)
    logits = engine.prefill_logits(0, ids, 0).cpu()
    expected = cpu.prefill_logits(0, ids, 0)
    assert torch.isfinite(logits).all()
    distance = (logits - expected).norm() / expected.norm()
    assert float(distance) < 0.1
    assert len(decode_after(engine, ids)) == 16


def decode_after(engine: TorchEngine, ids: list[int]) -> list[int]:
    read(engine, 1, ids)
    return decode(engine, 1, 16, 4)


def test_planned_memory_is_what_the_device_gives(cuda: TorchEngine) -> None:
    held = [item for item in cuda.info.memory_plan if item.actual_bytes is not None]
    assert all(item.planned_bytes == item.actual_bytes for item in held)
