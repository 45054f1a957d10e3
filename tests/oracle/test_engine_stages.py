"""A model over three stages gives the tokens of one device: in any company, parked, preempted, cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from engine.config import EngineConfig
from engine.engine import TorchEngine
from engine.errors import ConfigMismatch, PlanError
from engine.interface import DecodeStep, PrefillChunk, SlotStart, WindowPlan
from engine.loading import load_engine
from tests.oracle import tiny
from tests.oracle.conftest import engine_config
from tests.oracle.driver import GREEDY
from tests.property.schedules import Schedule, Seen, Solo
from tests.property.test_schedules import MODEL_TEXTS

NAME = "gqa3_gdn2"
"""Four layers; the second, which is the middle stage's first, has the n-gram injection."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    checkpoint = tiny.make_checkpoint(tmp_path_factory.mktemp("stages"), NAME)
    return replace(engine_config(checkpoint), num_slots=3, kernels="torch")


@pytest.fixture(scope="module")
def staged(config: EngineConfig) -> Iterator[TorchEngine]:
    engine = load_engine(replace(config, num_groups=3), rehearse=True)
    yield engine
    engine.close()


def test_every_schedule_gives_the_tokens_of_one_device(
    config: EngineConfig, staged: TorchEngine
) -> None:
    solo = Solo(load_engine(config))
    seen = Seen()
    for seed in range(3):
        Schedule(staged, MODEL_TEXTS, Random(seed), solo, resumes_decoded=False).run(5, seen)
    assert min(seen.cached, seen.cancelled, seen.preemptions) > 0, seen


def test_a_group_lands_while_another_flies(staged: TorchEngine) -> None:
    starts = tuple(SlotStart(slot=slot, sampling=GREEDY) for slot in range(3))
    chunks = tuple(
        PrefillChunk(slot=slot, start=0, token_ids=(3, 4, 5 + slot), is_last=True)
        for slot in range(3)
    )
    first = staged.run_window(WindowPlan(starts=starts, chunks=chunks))
    # Of three pieces, two may fly on.
    assert [tokens.slot for tokens in first.tokens] == [0]
    assert first.in_flight == (1, 2)
    step = DecodeStep(slot=0, max_draft=2, spec_min_p=0.0)
    second = staged.run_window(WindowPlan(decodes=(step,)))
    assert [tokens.slot for tokens in second.tokens] == [1]
    assert second.in_flight == (0, 2)
    for busy in (WindowPlan(decodes=(step,)), WindowPlan(starts=starts[2:])):
        with pytest.raises(PlanError, match="in flight"):
            staged.run_window(busy)
    # What is started anew must not meet what still flies.
    third = staged.run_window(WindowPlan(starts=starts[1:2], chunks=chunks[1:2]))
    assert [tokens.slot for tokens in third.tokens] == [2, 0]
    assert third.in_flight == (1,)
    last = staged.run_window(WindowPlan())
    assert [tokens.token_ids for tokens in last.tokens] == [second.tokens[0].token_ids]
    assert last.in_flight == ()


def test_each_stage_plans_its_own_memory(config: EngineConfig, staged: TorchEngine) -> None:
    whole = {item.name: item for item in load_engine(config).info.memory_plan}
    parts = staged.info.memory_plan
    assert all(item.planned_bytes == item.actual_bytes for item in parts if item.actual_bytes)
    for name in ("gdn", "qsa", "moe", "residual", "ple table", "session s", "draft layer", "head"):
        found = [item for item in parts if item.name.rpartition(": ")[2] == name]
        assert sum(item.planned_bytes for item in found) == whole[name].planned_bytes, name
    assert staged.info.device == "cpu, cpu, cpu"
    assert "layers 0 to 0 on cpu, 1 to 2 on cpu, 3 to 3 on cpu" in staged.info.kernels


def test_what_cannot_be_spread_is_refused(config: EngineConfig) -> None:
    for changes, found in (
        ({"num_groups": 4}, "found 4, required at most the 3 slots"),
        ({"num_groups": 2, "parked_dir": "somewhere"}, "conversation files"),
        ({"num_groups": 2, "expert_cache": 3}, "expert cache"),
        ({"num_groups": 2, "kernels": "compiled"}, "without --batch-groups"),
    ):
        with pytest.raises(ConfigMismatch, match=found):
            load_engine(replace(config, **changes))
    with pytest.raises(ConfigMismatch, match="found 5, required at most the model's 4 layers"):
        load_engine(replace(config, num_groups=5, num_slots=6))
