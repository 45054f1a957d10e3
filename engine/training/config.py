"""The numbers of a model, read from its config.json, and the choices of a training run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the layers need of config.json, under its names; see `from_dict` for what is derived."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    full_attention_interval: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    hc_count: int
    hc_lowrank: int
    ple_layer_index: int
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int
    seed: int
    eos_token_id: int

    @property
    def stream_size(self) -> int:
        """Width of all residual streams side by side."""
        return self.hc_count * self.hidden_size

    @property
    def num_ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    def is_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    @staticmethod
    def from_dict(config: dict[str, Any]) -> ModelConfig:
        """Read a text config.

        Raises: ValueError for what this training code does not build (no PLE or several, SiLU
        output gate, tied embeddings).
        """
        if len(config["ple_layer_ids"]) != 1 or config["tie_word_embeddings"]:
            raise ValueError("training needs exactly one PLE layer and an untied head")
        if config["output_gate_type"] != "sigmoid":
            raise ValueError(f"output_gate_type {config['output_gate_type']!r} is not sigmoid")
        rope = config["rope_parameters"]
        derived: dict[str, Any] = {
            "rotary_dim": math.floor(config["head_dim"] * rope["partial_rotary_factor"]),
            "rope_theta": float(rope["rope_theta"]),
            "ple_layer_index": config["ple_layer_ids"][0] - 1,
            "seed": config.get("seed", 1234),
        }
        names = set(ModelConfig.__dataclass_fields__) - set(derived)
        return ModelConfig(**{name: config[name] for name in names}, **derived)

    @staticmethod
    def from_file(path: Path) -> ModelConfig:
        return ModelConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run. The learning rate warms up, stays, and falls linearly over the last `decay_share`.

    QSA selects blocks, and the draft chain has its full length, from `select_from` (a share of
    the steps) on; before that attention is dense and only the indexer's own loss trains it.
    """

    num_steps: int = 1600
    batch_rows: int = 16
    matrix_lr: float = 4e-3
    vector_lr: float = 4e-3
    weight_decay: float = 0.3
    warmup_steps: int = 100
    decay_share: float = 0.5
    select_from: float = 0.8
    dropout: float = 0.05
    mtp_steps_early: int = 2
    mtp_steps: int = 4
    mtp_weight: float = 0.3
    balance_weight: float = 0.01
    indexer_weight: float = 0.1
    user_token_weight: float = 0.3
    max_grad_norm: float = 1.0
    seed: int = 1234

    def is_selecting(self, step: int) -> bool:
        return step >= self.select_from * self.num_steps

    def mtp_steps_at(self, step: int) -> int:
        return self.mtp_steps if self.is_selecting(step) else self.mtp_steps_early

    def lr_scale(self, step: int) -> float:
        """Factor on every learning rate at `step`, 0 < factor <= 1."""
        warm = (step + 1) / self.warmup_steps
        left = (self.num_steps - step) / max(1.0, self.decay_share * self.num_steps)
        return max(min(1.0, warm, left), 1e-3)
