from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.training.config import ModelConfig
from engine.training.export import (
    checkpoint_tensors,
    dequantize,
    load_model,
    load_stored,
    quantize,
    quantized_tensors,
    save_checkpoint,
    write_float_copy,
)
from engine.training.model import TrainingModel

from .conftest import DEFAULT_MODEL_DIR


def _stir(model: TrainingModel) -> TrainingModel:
    """Move every parameter off its initial value, so that no term of the model is zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@pytest.fixture
def model(config: ModelConfig) -> TrainingModel:
    return _stir(TrainingModel(config))


@pytest.fixture
def folder(model: TrainingModel, config_dict: dict[str, Any], tmp_path: Path) -> Path:
    save_checkpoint(quantized_tensors(checkpoint_tensors(model)), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_dict), encoding="utf-8")
    return tmp_path


def test_rounding_error_is_at_most_half_a_step_of_the_row() -> None:
    weight = torch.randn(5, 7, 33) * torch.logspace(-3, 2, 7)[:, None]
    weight[0, 0] = 0.0
    values, scale = quantize(weight)
    assert values.dtype == torch.int8
    assert scale.shape == weight.shape[:-1]
    error = (dequantize(values, scale) - weight).abs().amax(dim=-1)
    assert (error <= weight.abs().amax(dim=-1) / 127 * 0.5001).all()


def test_export_loads_back_within_rounding(
    model: TrainingModel, folder: Path, config: ModelConfig
) -> None:
    loaded = load_model(folder, config)
    for name, tensor in model.state_dict().items():
        step = tensor.abs().amax(dim=-1, keepdim=True) / 100 if tensor.dim() > 1 else 0.01
        difference = (loaded.state_dict()[name] - tensor).abs()
        assert (difference <= step + tensor.abs() / 100).all(), name


def test_stored_names_and_dtypes(folder: Path, config: ModelConfig) -> None:
    stored = load_stored(folder)
    assert sum(name.startswith("mtp.") and not name.endswith("_scale") for name in stored) == 31
    shards = [name for name in stored if "ngram_embedding.shard_" in name and "_scale" not in name]
    assert len(shards) == config.split_ngram_parts
    experts = stored["model.layers.0.mlp.experts.gate_up_proj"]
    assert (experts.dtype, tuple(experts.shape)) == (torch.int8, (8, 16, 32))
    scale = stored["model.layers.0.mlp.experts.gate_up_proj_scale"]
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (8, 16))
    assert stored["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert stored["model.layers.0.linear_attn.conv1d.weight"].dtype == torch.bfloat16
    buffer = "model.layers.1.ple.ple_embedding.layer_multipliers"
    assert stored[buffer].dtype == torch.int64


def test_logits_equal_those_of_transformers_on_the_exported_weights(
    folder: Path, config: ModelConfig, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    out = tmp_path / "floats"
    write_float_copy(folder, out, torch.float32)
    theirs, info = transformers.Qwen4ExpForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours = load_model(folder, config).eval()
    # 80 tokens against a budget of 32: selection is at work; EOS inside cuts n-gram contexts.
    ids = torch.randint(0, config.vocab_size, (2, 80))
    ids[0, 5] = ids[1, 40] = ids[1, 42] = config.eos_token_id
    with torch.no_grad():
        expected = theirs(ids).logits
        got = ours.logits(ours.run_trunk(ids, is_selecting=True).hidden)
        dense = ours.logits(ours.run_trunk(ids, is_selecting=False).hidden)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert (dense - expected).abs().max() > 1e-3


def test_shipped_weights_are_whole_and_small() -> None:
    stored = load_stored(DEFAULT_MODEL_DIR)
    assert stored
    load_model(DEFAULT_MODEL_DIR, ModelConfig.from_file(DEFAULT_MODEL_DIR / "config.json"))
    files = [path for path in DEFAULT_MODEL_DIR.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 32 << 20
