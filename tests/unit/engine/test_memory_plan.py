"""The plan against what is really allocated: equal to the byte, so an error in either direction shows."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigMismatch, PlanMismatch, PlanRefused
from engine.loading import load_engine
from engine.memory_plan import MIB, MemoryPlan, PlanLine, Step, make_plan
from engine.model_spec import spec_from_config
from engine.startup import StartupMarks, allowed_bytes, held_bytes
from engine.state import SlotState, state_shapes
from tests.oracle.tiny import GRID, make_checkpoint
from tests.random_weights import SMALL, write_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.mark.parametrize(
    ("kernels", "dtype", "kv", "held_as"),
    [
        ("compiled", "float32", "auto", "float32"),
        ("compiled", "float32", "bf16", "bfloat16"),
        ("compiled", "float32", "int8", "int8"),
        ("torch", "float32", "auto", "float32"),
        ("torch", "float32", "bf16", "bfloat16"),
        ("torch", "float32", "int8", "int8"),
        ("torch", "bfloat16", "auto", "bfloat16"),
        ("torch", "bfloat16", "fp32", "float32"),
        ("torch", "bfloat16", "int8", "int8"),
    ],
)
@pytest.mark.parametrize("name", GRID)
def test_every_planned_line_is_allocated_as_planned(
    directory: Path, name: str, kernels: str, dtype: str, kv: str, held_as: str
) -> None:
    checkpoint = make_checkpoint(directory, name)
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        dtype=dtype,
        kv=kv,
        kernels=kernels,
        max_context=100,
        chunk_tokens=32,
    )
    info = load_engine(config).info
    assert info.kv_dtype == held_as
    items = info.memory_plan
    measured = [item for item in items if item.actual_bytes is not None]
    assert [(i.name, i.planned_bytes) for i in measured] == [
        (i.name, i.actual_bytes) for i in measured
    ]
    unmeasured = {item.name for item in items} - {item.name for item in measured}
    converted = set[str]() if held_as == dtype else {"converted K/V"}
    passing = {"window logits", "prefill buffers"} | converted
    assert unmeasured == (passing if kernels == "torch" else {"prompt streams"})
    assert {"session k_scale", "session v_scale"} <= {i.name for i in items} or held_as != "int8"


@pytest.mark.parametrize("kernels", ["compiled", "portable"])
def test_int8_weights_are_held_as_planned_however_they_are_packed(kernels: str) -> None:
    config = EngineConfig(device="cpu", kernels=kernels, max_context=100, threads=2)
    measured = [i for i in load_engine(config).info.memory_plan if i.actual_bytes is not None]
    assert {"moe", "head", "draft layer", "step scratch"} <= {i.name for i in measured}
    assert [i.planned_bytes for i in measured] == [i.actual_bytes for i in measured]


def test_without_drafts_the_draft_layer_is_neither_planned_nor_held(directory: Path) -> None:
    checkpoint = make_checkpoint(directory, "no_ple")
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", max_context=64, max_draft=0
    )
    names = {item.name for item in load_engine(config).info.memory_plan}
    assert "draft layer" not in names


geometries = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(8, 64),
        "hidden_size": st.sampled_from([8, 24, 40]),
        "num_hidden_layers": st.integers(1, 6),
        "num_attention_heads": st.sampled_from([2, 4]),
        "num_key_value_heads": st.sampled_from([1, 2]),
        "head_dim": st.sampled_from([8, 16]),
        "linear_num_key_heads": st.sampled_from([1, 2]),
        "linear_num_value_heads": st.sampled_from([2, 4]),
        "linear_key_head_dim": st.sampled_from([4, 8]),
        "linear_value_head_dim": st.sampled_from([4, 12]),
        "linear_conv_kernel_dim": st.integers(2, 5),
        "num_experts": st.integers(2, 5),
        "hc_count": st.integers(2, 4),
        "indexer_head_dim": st.sampled_from([8, 16]),
        "indexer_compress_ratio": st.sampled_from([2, 4]),
        "ple_layer_ids": st.sampled_from([[], [1]]),
        "mtp_num_hidden_layers": st.integers(0, 1),
    }
)


@given(
    changes=geometries,
    num_slots=st.integers(1, 4),
    max_context=st.integers(1, 300),
    kv_dtype=st.sampled_from([torch.bfloat16, torch.int8]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_sessions_of_any_geometry_are_allocated_as_planned(
    changes: dict[str, Any], num_slots: int, max_context: int, kv_dtype: torch.dtype
) -> None:
    base: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "indexer_n_heads": 2,
        "indexer_budget": 16,
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 11,
        "eos_token_id": 1,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 512,
    }
    spec = spec_from_config(json.loads(json.dumps({**base, **changes})), name="random")
    shapes = state_shapes(spec, num_slots=num_slots, max_context=max_context, kv_dtype=kv_dtype)
    state = SlotState(
        spec,
        num_slots=num_slots,
        max_context=max_context,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        device=torch.device("cpu"),
    )
    held = {name: getattr(state, name) for name in shapes}
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == shapes
    fp32 = {"s", "replay_k", "replay_delta", "replay_factor", "k_scale", "v_scale"}
    for name, tensor in held.items():
        kv = kv_dtype if name in ("k", "v") else torch.bfloat16
        assert tensor.dtype == (torch.float32 if name in fp32 else kv), name
    others = [
        name
        for name in SlotState.__dict__.get("__slots__", ()) or vars(state)
        if isinstance(getattr(state, name), torch.Tensor) and name not in shapes
    ]
    assert others == []


small_geometries = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(40, 70),
        "hidden_size": st.sampled_from([8, 24, 40]),
        "num_hidden_layers": st.integers(4, 5),
        "linear_num_value_heads": st.sampled_from([1, 2]),
        "linear_value_head_dim": st.sampled_from([4, 12]),
        "linear_conv_kernel_dim": st.integers(2, 4),
        "num_experts": st.integers(2, 5),
        "moe_intermediate_size": st.sampled_from([4, 12]),
        "shared_expert_intermediate_size": st.sampled_from([8, 20]),
        "hc_count": st.integers(2, 3),
        "ple_layer_ids": st.sampled_from([[], [1], [2]]),
        "mtp_num_hidden_layers": st.integers(0, 1),
    }
)


@given(
    changes=small_geometries,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kv=st.sampled_from(["auto", "int8"]),
    expert_cache=st.sampled_from([None, 0, 3]),
    ple_io=st.sampled_from(["ram", "mmap"]),
)
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
def test_the_sum_of_the_plan_is_what_is_held_for_any_geometry(
    directory: Path,
    changes: dict[str, Any],
    dtype: str,
    kv: str,
    expert_cache: int | None,
    ple_io: str,
) -> None:
    """Against a count of all live tensors, which knows no parts. Equal: a term too large shows like one too small."""
    checkpoint = write_checkpoint(directory / "random", {**SMALL, **changes})
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        dtype=dtype,
        kv=kv,
        threads=1,
        max_context=70,
        chunk_tokens=32,
        max_draft=4 if changes["mtp_num_hidden_layers"] else 0,
        expert_cache=expert_cache,
        ple_io=ple_io,
        kernels="torch",
    )
    gc.collect()
    before = held_bytes()
    engine = load_engine(config)
    gc.collect()
    held = held_bytes() - before
    items = [item for item in engine.info.memory_plan if item.actual_bytes is not None]
    assert {i.name: i.planned_bytes for i in items} == {i.name: i.actual_bytes for i in items}
    # What no line names: hash constants, the fixed tables of a layer.
    assert 0 <= held - sum(item.planned_bytes for item in items) < 4096
    engine.close()


@pytest.mark.parametrize("off_mib", [65, 3, -3, -65])
def test_a_start_that_takes_other_than_planned_is_refused(off_mib: int) -> None:
    """An error that tightens the budget is as bad as one that breaks it."""
    line = PlanLine(name="weights", num_bytes=(100 + off_mib) * MIB, step=Step.WEIGHTS)
    marks = StartupMarks(MemoryPlan(lines=(line,)))
    held = torch.empty(100 * MIB, dtype=torch.uint8)
    allowed = max(1.0, 0.02 * (100 + off_mib))
    with pytest.raises(
        PlanMismatch,
        match=rf"weights.* MiB were planned but 100.0 MiB are taken; .* difference of {allowed:.1f} MiB",
    ):
        marks.reach(Step.WEIGHTS)
    assert held.numel()


def test_what_an_earlier_start_left_in_a_cycle_is_not_taken_for_this_ones() -> None:
    gc.disable()
    try:
        left: list[object] = [torch.empty(100 * MIB, dtype=torch.uint8)]
        left.append(left)
        del left
        marks = StartupMarks(MemoryPlan(lines=()))
        gc.collect()
        marks.reach(Step.WEIGHTS)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("planned_mib", "allowed_mib"), [(1, 1), (50, 1), (100, 2), (3200, 64), (80_000, 64)]
)
def test_a_checkpoint_may_be_off_by_two_percent_and_by_64_mib(
    planned_mib: int, allowed_mib: int
) -> None:
    assert allowed_bytes(planned_mib * MIB) == allowed_mib * MIB


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_a_prompt_chunk_beyond_the_context_is_planned_as_what_can_come(
    directory: Path, kernels: str
) -> None:
    config = EngineConfig(
        model=str(make_checkpoint(directory, "gqa3_gdn2")),
        device="cpu",
        dtype="float32",
        kernels=kernels,
        max_context=64,
        chunk_tokens=65_536,
    )
    load_engine(config, rehearse=True).close()


@pytest.mark.parametrize(
    "changes",
    [
        *({"chunk_tokens": count} for count in (1, 2, 8, 16, 33, 64)),
        {"max_context": 17},
        {"chunk_tokens": 8, "expert_cache": 7},
        {"chunk_tokens": 3, "dtype": "float32"},
    ],
)
def test_a_short_piece_takes_what_was_planned(changes: dict[str, Any]) -> None:
    """What does not shrink with it: a chunk of the delta rule, and the choice of how to multiply so few rows."""
    load_engine(EngineConfig(device="cpu", kernels="torch", **changes), rehearse=True).close()


@pytest.mark.parametrize("heads", [(2, 1), (4, 2)])
@pytest.mark.parametrize("max_context", [1000, 4096])
def test_a_long_piece_at_the_end_of_a_long_context_takes_what_was_planned(
    tmp_path: Path, max_context: int, heads: tuple[int, int]
) -> None:
    """Attention scores are nearly all of it, in one tile and in several."""
    changes = {
        "max_position_embeddings": 4096,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
    }
    config = EngineConfig(
        model=str(write_checkpoint(tmp_path / "long", {**SMALL, **changes})),
        device="cpu",
        dtype="float32",
        kernels="torch",
        max_context=max_context,
        chunk_tokens=max_context,
    )
    load_engine(config, rehearse=True).close()


def test_a_model_without_an_attention_layer_starts_and_can_be_parked(directory: Path) -> None:
    changes = {"num_hidden_layers": 2, "mtp_num_hidden_layers": 0}
    checkpoint = write_checkpoint(directory / "no_attention", {**SMALL, **changes})
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", max_context=64, max_draft=0
    )
    info = load_engine(config).info
    assert info.page_bytes == info.checkpoint_bytes > 0


def test_checkpoints_add_up_and_passing_buffers_count_again() -> None:
    lines = [
        PlanLine(name=step.name, num_bytes=(MIB // 16) << i, step=step)
        for i, step in enumerate(Step)
    ]
    marks = StartupMarks(MemoryPlan(lines=tuple(lines)))
    marks.reach(Step.WEIGHTS)
    marks.reach(Step.PROMPT, passing_bytes=3 * MIB)
    marks.reach(Step.VERIFIER, passing_bytes=4 * MIB)
    assert [16 * m.planned_bytes // MIB for m in marks.marks] == [1, 63, 127]
    assert [m.actual_bytes // MIB for m in marks.marks[1:]] == [3, 7]


def test_a_plan_that_does_not_fit_gives_both_numbers_and_the_option() -> None:
    spec = spec_from_config(
        {
            "model_type": "qwen4_exp_text",
            "vocab_size": 1024,
            "hidden_size": 512,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "indexer_n_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "rope_parameters": {"rope_theta": 1e7},
            "max_position_embeddings": 512,
        },
        name="big",
    )
    plan = make_plan(
        spec,
        state_bytes={"s": 3 << 20},
        element_bytes=4,
        converts_kv=False,
        num_positions=1,
        max_context=1,
        chunk_tokens=1,
        window_rows=1,
        with_draft=False,
    )
    plan.require(plan.total(), "RAM")
    with pytest.raises(
        PlanRefused, match=r"needs \d+ MiB of RAM but 1 MiB .*3 MiB are sessions.*--max-context"
    ):
        plan.require(1 << 20, "RAM")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 5}, "--batch: found 5, required 1 to 4"),
        ({"max_context": 513}, "--max-context: found 513, required at most the model's 512"),
        ({"max_draft": 5}, "--spec: found 5, required 0 to 4"),
        ({"kv": "int4"}, "--kv: found int4, required auto, fp32, bf16, int8"),
    ],
)
def test_choices_out_of_range_are_refused_before_loading(
    directory: Path, changes: dict[str, Any], message: str
) -> None:
    checkpoint = make_checkpoint(directory, "no_ple")
    with pytest.raises(ConfigMismatch, match=message):
        load_engine(EngineConfig(model=str(checkpoint), device="cpu", **changes))


def test_drafts_from_a_model_without_draft_layer_are_refused(directory: Path) -> None:
    checkpoint = make_checkpoint(directory, "no_ple", with_mtp=False)
    with pytest.raises(ConfigMismatch, match="has no draft layer .*--no-mtp"):
        load_engine(EngineConfig(model=str(checkpoint), device="cpu"))
    plain = load_engine(EngineConfig(model=str(checkpoint), device="cpu", max_draft=0))
    assert plain.info.max_draft == 0
