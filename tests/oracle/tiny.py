"""A named grid of small random models, weights made and saved by Hugging Face's own classes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

EOS = 3


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One random model: the shape differences from `BASE` and the seed of its weights."""

    seed: int
    changes: dict[str, Any] = field(default_factory=dict[str, Any])

    def config(self) -> Qwen4ExpTextConfig:
        return Qwen4ExpTextConfig(**{**BASE, **self.changes})


BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "hc_count": 4,
    "hc_lowrank": 12,
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 101,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 4,
    "output_gate_type": "sigmoid",
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "max_position_embeddings": 512,
}

GRID: dict[str, Tiny] = {
    # 6 query heads on 2 KV heads, 4 key heads on 8 value heads.
    "gqa3_gdn2": Tiny(
        seed=11,
        changes={
            "num_attention_heads": 6,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    # One KV head; three value heads per key head as in the real model; 8 layers, so two that select.
    "gqa4_gdn3_deep": Tiny(
        seed=12,
        changes={
            "vocab_size": 97,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    # No sharing of heads at all; two streams; vocabulary that no tile divides.
    "mha_gdn1_two_streams": Tiny(
        seed=13,
        changes={
            "vocab_size": 257,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "hc_count": 2,
        },
    ),
    # Key and value columns differ; 2 layers out of 6 that select; odd number of experts.
    "gdn_wide_values": Tiny(
        seed=14,
        changes={
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention"] * 2
            + ["full_attention"]
            + ["linear_attention"] * 2
            + ["full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 24,
            "num_experts": 7,
            "num_experts_per_tok": 2,
        },
    ),
    # No n-gram embedding; blocks of two; a budget that only a long prompt passes.
    "no_ple": Tiny(
        seed=15,
        changes={
            "ple_layer_ids": None,
            "indexer_compress_ratio": 2,
            "indexer_budget": 32,
            "linear_conv_kernel_dim": 3,
        },
    ),
}


def build(name: str) -> Qwen4ExpForCausalLM:
    """The named model in fp32, every weight random from the name's seed."""
    tiny = GRID[name]
    config = tiny.config()
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(tiny.seed)
        model = Qwen4ExpForCausalLM(config).float().eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(random_tensor(key, tuple(parameter.shape)))
    return model


def make_checkpoint(tmp_path: Path, name: str, with_mtp: bool = True) -> Path:
    """Save the named model as a checkpoint directory, with a random draft layer when asked for."""
    trunk = tmp_path / f"{name}_trunk"
    if not trunk.exists():
        build(name).save_pretrained(trunk)
    if not with_mtp:
        return trunk
    whole = tmp_path / f"{name}_mtp"
    if not whole.exists():
        shutil.copytree(trunk, whole)
        path = whole / "model.safetensors"
        tensors = {**load_file(path), **mtp_tensors(name)}
        save_file(tensors, path, metadata={"format": "pt"})
        config_file = whole / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        config["mtp_num_hidden_layers"] = 1
        config_file.write_text(json.dumps(config), encoding="utf-8")
    return whole


def load_hf(checkpoint: Path) -> Qwen4ExpForCausalLM:
    """The checkpoint as Hugging Face reads it."""
    return Qwen4ExpForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def mtp_tensors(name: str) -> dict[str, Tensor]:
    """The draft layer's tensors (model.md 3.1), random from the name's seed."""
    tiny = GRID[name]
    config = tiny.config()
    hidden, wide, rank = config.hidden_size, config.hc_count * config.hidden_size, config.hc_lowrank
    shapes: dict[str, tuple[int, ...]] = {
        "fc_embedding.weight": (hidden, hidden),
        "fc_hidden.weight": (hidden, hidden),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (wide,),
        "hyper_connection_mixer.hc_norm.weight": (wide,),
        "hyper_connection_mixer.input_mix_weight_down.weight": (rank, wide),
        "hyper_connection_mixer.input_mix_weight_up.weight": (wide, rank),
    }
    shapes |= {f"layers.0.{key}": shape for key, shape in _attention_layer_shapes(config).items()}
    generator = torch.Generator().manual_seed(tiny.seed + 1000)
    return {
        f"mtp.{key}": random_tensor(f"mtp.{key}", shape, generator) for key, shape in shapes.items()
    }


def _attention_layer_shapes(config: Qwen4ExpTextConfig) -> dict[str, tuple[int, ...]]:
    hidden, wide, rank = config.hidden_size, config.hc_count * config.hidden_size, config.hc_lowrank
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    index_heads, index_dim = config.indexer_n_heads, config.indexer_head_dim
    assert index_heads is not None
    assert index_dim is not None
    expert, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}
    for mixer in ("attn_hyper_connection", "mlp_hyper_connection"):
        shapes[f"{mixer}.hc_norm.weight"] = (wide,)
        shapes[f"{mixer}.input_mix_weight_down.weight"] = (rank, wide)
        shapes[f"{mixer}.input_mix_weight_up.weight"] = (wide, rank)
        shapes[f"{mixer}.block_inject_weight.weight"] = (config.hc_count, wide)
    return shapes | {
        "self_attn.q_proj.weight": (2 * heads * dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "self_attn.indexer.index_qk_proj.weight": ((index_heads + 1) * index_dim, hidden),
        "self_attn.indexer.q_layernorm.weight": (index_dim,),
        "self_attn.indexer.k_layernorm.weight": (index_dim,),
        "mlp.gate.weight": (config.num_experts, hidden),
        "mlp.experts.gate_up_proj": (config.num_experts, 2 * expert, hidden),
        "mlp.experts.down_proj": (config.num_experts, hidden, expert),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


GAINS: tuple[tuple[str, float], ...] = (
    ("lm_head", 1.5),
    ("mlp.gate.", 2.0),
    ("block_inject", 4.0),
    ("input_mix", 2.0),
    ("experts", 1.4),
    ("in_proj_a", 0.7),
)
"""How far above 1/sqrt(fan in) a projection's values are, so that no gate sits still and no router is uniform."""


def random_tensor(
    key: str, shape: tuple[int, ...], generator: torch.Generator | None = None
) -> Tensor:
    """Values under which every formula of the model shows: no norm weight is 0 or 1, no gate is shut."""
    normal = torch.randn(shape, generator=generator)
    if key.endswith("linear_attn.norm.weight"):
        return 1.0 + 0.3 * normal
    if key.endswith("A_log"):
        return normal * 0.7
    if key.endswith("dt_bias"):
        return normal - 1.0
    if "norm" in key.rsplit(".", 2)[-2]:
        return 0.3 * normal
    if key.endswith("conv1d.weight"):
        return normal * 0.5
    if "embed_tokens" in key or "ngram_embedding" in key:
        return normal
    gain = next((g for part, g in GAINS if part in key), 1.0)
    return normal * gain / shape[-1] ** 0.5


TEXT_TOKENS = 120
EOS_AT = (5, 30, 31, 77)


def text(name: str, seed: int = 0) -> list[int]:
    """TEXT_TOKENS random ids with EOS at EOS_AT; every test reads a part of one of these."""
    generator = torch.Generator().manual_seed(seed)
    vocab = GRID[name].config().vocab_size
    ids = torch.randint(EOS + 1, vocab, (TEXT_TOKENS,), generator=generator).tolist()
    for position in EOS_AT:
        ids[position] = EOS
    return ids


def monotone_text(name: str) -> list[int]:
    """Mostly one token, over and over: keys that hardly differ are the hard case of the chunked delta rule."""
    ids = text(name)
    return [*ids[:3], *[ids[3]] * 90, *ids[3:10]]
