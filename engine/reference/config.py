"""The numbers of a text model as its config.json states them. Refuses to know any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """Names follow config.json; only what the formulas of the model use."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    eos_token_id: int
    attention_layers: frozenset[int]
    """0-based layers that are QSA; the others are GDN."""
    hc_count: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    output_gate_type: str
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    ple_layers: frozenset[int]
    """0-based; the config's list is 1-based."""
    ngram_size: int
    heads_per_ngram: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ReferenceConfig:
        """Read a config.json, of the text model or of the whole model around it."""
        text = config.get("text_config", config)
        rope = text["rope_parameters"]
        eos = text["eos_token_id"]
        num_layers = text["num_hidden_layers"]
        types = text.get("layer_types") or _layer_types(
            num_layers, text.get("full_attention_interval", 4)
        )
        return cls(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            num_hidden_layers=num_layers,
            rms_norm_eps=text["rms_norm_eps"],
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
            attention_layers=frozenset(i for i, t in enumerate(types) if t != "linear_attention"),
            hc_count=text["hc_count"],
            num_attention_heads=text["num_attention_heads"],
            num_key_value_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            rope_theta=rope["rope_theta"],
            rotary_dim=int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0)),
            indexer_n_heads=text["indexer_n_heads"],
            indexer_head_dim=text["indexer_head_dim"],
            indexer_budget=text["indexer_budget"],
            indexer_compress_ratio=text["indexer_compress_ratio"],
            linear_num_key_heads=text["linear_num_key_heads"],
            linear_num_value_heads=text["linear_num_value_heads"],
            linear_key_head_dim=text["linear_key_head_dim"],
            linear_value_head_dim=text["linear_value_head_dim"],
            output_gate_type=text.get("output_gate_type") or text["hidden_act"],
            num_experts=text["num_experts"],
            num_experts_per_tok=text["num_experts_per_tok"],
            norm_topk_prob=text.get("norm_topk_prob", True),
            ple_layers=frozenset(i - 1 for i in text.get("ple_layer_ids") or ()),
            ngram_size=text.get("ngram_size", 3),
            heads_per_ngram=text.get("heads_per_ngram", 8),
        )


def _layer_types(num_layers: int, interval: int) -> list[str]:
    return [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(num_layers)
    ]
