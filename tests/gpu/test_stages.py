"""Two GPUs give the tokens of one with the Triton kernels, in any company, with drafts and without, parked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import TorchEngine
from engine.errors import ConfigMismatch
from engine.loading import load_engine
from tests.fault.test_engine_process import is_alive
from tests.fault.test_stages import lose_a_stage
from tests.property.schedules import Schedule, Seen, Solo, Texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

TEXTS = Texts(vocab_size=8000, system_tokens=90, user_tokens=60, max_tokens=24, max_prompt=700)


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig(device="cuda", kernels="compiled", max_context=1024, chunk_tokens=256)


@pytest.fixture(scope="module")
def staged(config: EngineConfig) -> Iterator[TorchEngine]:
    engine = load_engine(replace(config, num_groups=2), rehearse=True)
    yield engine
    engine.close()


@pytest.mark.timeout(300)
def test_every_schedule_gives_the_tokens_of_one_gpu(
    config: EngineConfig, staged: TorchEngine
) -> None:
    solo = Solo(load_engine(config))
    seen = Seen()
    for seed in range(12):
        Schedule(staged, TEXTS, Random(seed), solo, resumes_decoded=False).run(6, seen)
    assert seen.cached > 0
    assert staged.info.device == "cuda:0, cuda:1"


def test_each_gpu_takes_what_was_planned_for_it(staged: TorchEngine) -> None:
    found = [item for item in staged.info.memory_plan if item.actual_bytes is not None]
    assert all(item.planned_bytes == item.actual_bytes for item in found)


@pytest.mark.timeout(300)
async def test_a_lost_stage_is_a_crash_of_the_engine(config: EngineConfig) -> None:
    """Whoever waits on its GPU for what never comes is not waited for."""
    assert not any(map(is_alive, await lose_a_stage(config, Solo(load_engine(config)))))


def test_more_groups_than_gpus_are_refused(config: EngineConfig) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ConfigMismatch, match=f"at most the {count} GPUs"):
        load_engine(replace(config, num_groups=count + 1, num_slots=count + 1))
