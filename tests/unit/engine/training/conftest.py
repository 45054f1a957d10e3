"""A tiny model of the default model's kind, and one thread: the tensors are too small for more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.training.config import ModelConfig

DEFAULT_MODEL_DIR = Path(__file__).parents[4] / "engine" / "default_model"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config_dict() -> dict[str, Any]:
    config = json.loads((DEFAULT_MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    config.update(
        vocab_size=96,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=16,
        hc_lowrank=4,
        indexer_head_dim=8,
        indexer_budget=32,
        ple_embed_dim=32,
        ngram_vocab_size_base=50,
        bos_token_id=90,
        eos_token_id=90,
    )
    config["rope_parameters"].update(mrope_section=[1, 1, 0])
    return dict(config)


@pytest.fixture
def config(config_dict: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(config_dict)
