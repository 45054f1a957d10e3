"""The geometry contract: every number of the real model, and what a bad config gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigMismatch
from engine.memory_plan import weight_bytes
from engine.model_spec import ModelSpec, spec_from_config
from engine.state import state_shapes
from tests.unit.engine.real_config import REAL_TEXT_CONFIG

REAL: dict[str, Any] = {
    **REAL_TEXT_CONFIG,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
}


def real(**changes: Any) -> ModelSpec:
    config = {"model_type": "qwen4_exp", "text_config": {**REAL, **changes}}
    return spec_from_config(config, name="real")


def test_the_numbers_of_the_real_model() -> None:
    spec = real()
    assert spec.qsa_layers == tuple(range(3, 48, 4))
    assert len(spec.gdn_layers) == 36
    assert spec.gdn.conv_channels == 10240
    assert spec.gdn.value_channels == 6144
    assert spec.stream_width == 10240
    assert spec.qsa.rotary_dim == 64
    assert spec.qsa.budget_blocks == 512
    assert spec.qsa.dense_tokens == 2051
    assert spec.ple is not None
    assert spec.ple.head_dim == 160
    assert spec.ple.history_rows == 9


def test_the_hash_constants_of_the_real_model() -> None:
    ple = real().ple
    assert ple is not None
    assert ple.multipliers(0) == (23703573157769, 20109073645365, 8052911324071)
    sizes = ple.head_vocab_sizes(0)
    assert sizes[:3] == (20000003, 20000023, 20000033)
    assert sizes[-1] == 20000171
    assert ple.head_offsets(0)[1] == sizes[0]
    assert sum(sizes) == 320_001_446
    assert ple.num_rows(0) == 320_001_536


def test_state_of_one_sequence_has_the_bytes_of_the_real_model() -> None:
    shapes = state_shapes(real(), num_slots=1, max_context=262144, kv_dtype=torch.bfloat16)
    assert _elements(shapes["s"]) * 4 == 113_246_208
    # History rows only: a window's rows come on top.
    assert shapes["conv"][2:] == (3 + 5, 10240)
    assert shapes["ple"][2:] == (9 + 5, 10240)
    assert shapes["k"][:3] == (13, 1, 2)
    # The index key store is ONE head of 128 per block of four tokens, not one per query head.
    assert shapes["index_blocks"][-1] == 128
    assert shapes["index_blocks"][2] == -(-shapes["k"][3] // 4)


def test_weights_have_the_bytes_of_the_real_model() -> None:
    """model.md 4.2, in bf16; norms, decay and bias are held in fp32 here, so parts are a little larger."""
    parts = weight_bytes(real(), element_bytes=2, num_positions=0, with_draft=True)
    expected = {
        "embedding": 635_699_200,
        "head": 635_699_200,
        "gdn": 2_086_510_464,
        "qsa": 617_358_336,
        "residual": 640_624_640,
        "ple": 32_839_680,
        "ple table": 51_200_245_760,
        "moe": 120_795_955_200 + 236_052_480 + 62_914_560,
        "draft layer": 2_607_150_848,
    }
    fp32_extra = {
        "gdn": 36 * 96 * 2,
        "qsa": 12 * 2 * (256 + 128) * 2,
        "residual": 97 * 10240 * 2,
        "ple": 3 * 10240 * 2,
        "draft layer": (2560 + 10240 + 3 * 10240 + 2 * (256 + 128)) * 2,
    }
    assert parts == {name: count * 2 + fp32_extra.get(name, 0) for name, count in expected.items()}


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size: found None, required an integer >= 1"),
        ({"hidden_size": 2560.0}, "hidden_size: found 2560.0"),
        ({"hidden_size": True}, "hidden_size: found True"),
        ({"num_experts": 0}, "num_experts: found 0, required an integer >= 1"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok: found 513, required at most"),
        ({"indexer_kv_heads": 4}, "indexer_kv_heads: found 4, required 1"),
        ({"indexer_budget": 2050}, "indexer_budget: found 2050, required a multiple"),
        ({"num_attention_heads": 25}, "num_attention_heads: found 25, required a multiple"),
        ({"linear_num_value_heads": 47}, "linear_num_value_heads: found 47"),
        ({"layer_types": ["linear_attention"] * 47}, "layer_types: found"),
        (
            {"layer_types": (["linear_attention"] * 3 + ["x"]) * 11 + ["x"] * 4},
            r"layer_types\[44\]: found 'x'",
        ),
        ({"output_gate_type": "tanh"}, "output_gate_type: found 'tanh'"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', required 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: found true"),
        ({"hc_count": 1}, "hc_count: found 1, required at least 2"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers: found 2, required 0 or 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: found 0, required a number > 0"),
        ({"rope_parameters": None}, "rope_parameters: found None, required an object"),
        ({"hidden_size": 10**30}, "hidden_size: found 10+, required at most 1048576"),
        ({"num_experts": 10**12}, "num_experts: found 10+, required at most 65536"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings: .*, required at most"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: found inf, required at most 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: found nan, required a number > 0"),
        ({"hc_lowrank": None}, "hc_lowrank: found None, required an integer >= 1"),
        ({"rms_norm_eps": None}, "rms_norm_eps: found None, required a number > 0"),
        (
            {"rope_parameters": {**REAL["rope_parameters"], "rope_theta": None}},
            "rope_theta: found None, required a number > 0",
        ),
        (
            {"rope_parameters": {**REAL["rope_parameters"], "partial_rotary_factor": None}},
            "partial_rotary_factor: found None, required a number > 0",
        ),
        (
            {"mtp": {"rope_theta": 1e4}},
            r"mtp\.rope_theta: found 10000\.0, required the trunk's 1e\+07",
        ),
        (
            {"rope_parameters": {**REAL["rope_parameters"], "rope_type": "yarn"}},
            r"rope_parameters\.rope_type: found 'yarn'",
        ),
        (
            {"rope_parameters": {**REAL["rope_parameters"], "partial_rotary_factor": 1.0}},
            "partial_rotary_factor: found 256 rotary dims",
        ),
        ({"ple_layer_ids": [0]}, r"ple_layer_ids: found \[0\]"),
        ({"ple_layer_ids": [49]}, r"ple_layer_ids: found \[49\]"),
        ({"eos_token_id": None}, "eos_token_id: found None"),
        ({"ple_embed_dim": 100}, "ple_embed_dim: found 100, required a multiple of 16"),
    ],
)
def test_a_bad_config_names_key_found_and_required(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        real(**changes)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "no config.json"), ("{", "not JSON"), ("[]", "found list")]
)
def test_a_config_file_that_is_none_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigMismatch, match=message):
        ModelSpec.from_dir(tmp_path)


@pytest.mark.parametrize("family", [None, "llama", 3])
def test_another_family_is_refused(family: object) -> None:
    with pytest.raises(ConfigMismatch, match="model_type: found .*, required one of"):
        spec_from_config({**REAL, "model_type": family}, name="other")


def test_a_directory_is_named_after_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL), encoding="utf-8")
    assert ModelSpec.from_dir(tmp_path).name == tmp_path.name
