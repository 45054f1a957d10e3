"""Checkpoints of any geometry with random weights, written without Hugging Face's classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.geometry import model_tensors
from engine.model_spec import spec_from_config

SMALL: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 8,
    "hc_lowrank": 6,
    "indexer_n_heads": 2,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 11,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "eos_token_id": 1,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 512,
    "mtp_num_hidden_layers": 1,
}


def write_checkpoint(directory: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A checkpoint directory of this configuration in bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        fact.name: (
            torch.randn(fact.shape, generator=generator) * fact.shape[-1] ** -0.5
        ).bfloat16()
        for fact in model_tensors(spec_from_config(config, name="random"))
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
