"""Which layers a device runs, and why not the compiled ones."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import kernels
from engine.config import EngineConfig
from engine.cuda import support
from engine.errors import ConfigMismatch
from engine.loading import pool_workers_of
from engine.model_spec import ModelSpec, spec_from_config
from engine.startup_plan import default_pool_workers
from tests.random_weights import SMALL

CUDA = torch.device("cuda")
CONFIG = EngineConfig(device="cuda")


def make_spec() -> ModelSpec:
    return spec_from_config(SMALL, name="small")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16, not in float32"),
        ({"kv": "fp32"}, "bf16 or int8, not in fp32"),
    ],
)
def test_choices_that_the_triton_kernels_do_not_have(changes: dict[str, Any], reason: str) -> None:
    found = support.why_unsupported_choice(replace(CONFIG, **changes))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    "changes",
    [
        {"kv": "auto"},
        {"kv": "bf16"},
        {"kv": "int8"},
        {"expert_cache": 8, "expert_profile": "ranking.bin"},
    ],
)
def test_choices_that_they_have(changes: dict[str, Any]) -> None:
    assert support.why_unsupported_choice(replace(CONFIG, **changes)) is None


@pytest.mark.parametrize(
    ("capability", "reason"), [((8, 9), "compute capability 9.0, not 8.9"), ((9, 0), None)]
)
def test_an_older_gpu_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str | None
) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: name)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    found = support.why_unsupported(CONFIG, make_spec(), CUDA)
    assert found is None if reason is None else found is not None and reason in found


def test_without_triton_torch_runs_unless_the_kernels_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    spec = make_spec()
    reason = kernels.why_not_compiled(CONFIG, spec, CUDA)
    assert reason == "its kernels need Triton, which is not installed"
    with pytest.raises(ConfigMismatch, match="--kernels compiled: its kernels need Triton"):
        kernels.why_not_compiled(replace(CONFIG, kernels="compiled"), spec, CUDA)
    torch_wanted = replace(CONFIG, kernels="torch")
    assert kernels.why_not_compiled(torch_wanted, spec, CUDA) == "--kernels torch"


def test_the_portable_step_is_one_of_a_cpu() -> None:
    wanted = replace(CONFIG, kernels="portable")
    with pytest.raises(ConfigMismatch, match="--kernels portable: it runs on cpu, not on cuda"):
        kernels.why_not_compiled(wanted, make_spec(), CUDA)


def test_far_experts_are_computed_by_a_pool_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.loading.why_unavailable", lambda: None)
    assert pool_workers_of(replace(CONFIG, pool_workers=3)) == 3
    assert pool_workers_of(replace(CONFIG, pool_workers=0)) == 0
    monkeypatch.setattr("engine.startup_plan._num_physical_cores", lambda: 9)
    assert pool_workers_of(CONFIG) == 8
    assert pool_workers_of(replace(CONFIG, num_groups=2)) == 4
    monkeypatch.setattr("engine.loading.why_unavailable", lambda: "it was not compiled")
    assert not caplog.records
    assert pool_workers_of(replace(CONFIG, pool_workers=3)) == 0
    assert "over the bus: it was not compiled" in caplog.text


def test_a_pool_has_at_least_one_thread() -> None:
    assert default_pool_workers(64) == 1
    assert 1 <= default_pool_workers(1) <= max(1, len(os.sched_getaffinity(0)) - 1)
