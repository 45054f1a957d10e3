"""GGUF metadata of `qwen4exp` to and from a checkpoint's configuration. Pure, no torch.

What a GGUF file does not say is derived: the base of the hash vocabularies from the first of them, the padding of the
n-gram table from its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import ConfigMismatch

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec

ARCHITECTURE = "qwen4exp"
_USUAL_TABLE_MULTIPLE = 128


def config_from_metadata(
    metadata: Mapping[str, Any], *, vocab_size: int, table_rows: int | None
) -> dict[str, Any]:
    """The configuration that a checkpoint of this file would have. Raises ConfigMismatch naming the key."""
    found = metadata.get("general.architecture")
    if found != ARCHITECTURE:
        raise ConfigMismatch(f"general.architecture: found {found!r}, required {ARCHITECTURE!r}")
    keys = _Keys(metadata)
    num_draft = int(metadata.get(f"{ARCHITECTURE}.nextn_predict_layers", 0))
    num_layers = keys("block_count") - num_draft
    ratios = list(keys("attention.compress_ratios"))[:num_layers]
    block = max(ratios, default=0)
    head_dim = keys("attention.key_length")
    value_heads = keys("ssm.time_step_rank")
    config: dict[str, Any] = {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "vocab_size": vocab_size,
        "hidden_size": keys("embedding_length"),
        "num_hidden_layers": num_layers,
        "full_attention_interval": metadata.get(f"{ARCHITECTURE}.full_attention_interval", 4),
        "layer_types": ["full_attention" if r else "linear_attention" for r in ratios],
        "num_attention_heads": keys("attention.head_count"),
        "num_key_value_heads": keys("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": keys("context_length"),
        "rms_norm_eps": _shortest(keys("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        # The file does not say it; every model of this architecture has it.
        "output_gate_type": "sigmoid",
        "linear_num_key_heads": keys("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys("ssm.state_size"),
        "linear_value_head_dim": keys("ssm.inner_size") // value_heads,
        "linear_conv_kernel_dim": keys("ssm.conv_kernel"),
        "num_experts": keys("expert_count"),
        "num_experts_per_tok": keys("expert_used_count"),
        "moe_intermediate_size": keys("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "hc_count": keys("hyper_connection.count"),
        "hc_lowrank": keys("hyper_connection.low_rank"),
        "indexer_n_heads": keys("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys("attention.indexer.key_length"),
        "indexer_budget": keys("attention.indexer.top_k"),
        "indexer_compress_ratio": block,
        "rope_parameters": _rope(keys, head_dim),
        "mtp_num_hidden_layers": num_draft,
        "tie_word_embeddings": False,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    return config | _ple(metadata, keys, table_rows)


def metadata_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """What a GGUF file says of a model, keys without the architecture's prefix.

    Raises ConfigMismatch for a model that the format cannot describe.
    """
    gdn, qsa, moe, ple = spec.gdn, spec.qsa, spec.moe, spec.ple
    if gdn.gate != "sigmoid":
        raise ConfigMismatch(
            f"output_gate_type: found {gdn.gate!r}, required 'sigmoid' in a GGUF file"
        )
    if not moe.normalize:
        raise ConfigMismatch("norm_topk_prob: found false, required true in a GGUF file")
    ratios = [qsa.block_tokens if spec.is_qsa(layer) else 0 for layer in range(spec.num_layers)]
    half = qsa.rotary_dim // 2
    time = half // 3
    height = (half - time + 1) // 2
    metadata: dict[str, Any] = {
        "block_count": spec.num_layers + spec.num_draft_layers,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden,
        "full_attention_interval": spec.qsa_interval,
        "attention.head_count": qsa.num_heads,
        "attention.head_count_kv": qsa.num_kv_heads,
        "attention.key_length": qsa.head_dim,
        "attention.value_length": qsa.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "attention.indexer.head_count": qsa.num_index_heads,
        "attention.indexer.key_length": qsa.index_dim,
        "attention.indexer.top_k": qsa.budget_tokens,
        # The draft layer selects blocks as well.
        "attention.compress_ratios": ratios + [qsa.block_tokens] * spec.num_draft_layers,
        "rope.dimension_count": qsa.rotary_dim,
        "rope.dimension_sections": [height, half - time - height, time, 0],
        "rope.freq_base": qsa.rope_theta,
        "ssm.conv_kernel": gdn.conv_width,
        "ssm.state_size": gdn.key_dim,
        "ssm.group_count": gdn.num_key_heads,
        "ssm.time_step_rank": gdn.num_value_heads,
        "ssm.inner_size": gdn.value_channels,
        "expert_count": moe.num_experts,
        "expert_used_count": moe.num_active,
        "expert_feed_forward_length": moe.expert_dim,
        "expert_shared_feed_forward_length": moe.shared_dim,
        "hyper_connection.count": spec.num_streams,
        "hyper_connection.low_rank": spec.mix_rank,
    }
    if spec.num_draft_layers:
        metadata["nextn_predict_layers"] = spec.num_draft_layers
    if ple is None:
        return metadata
    if len(ple.layer_ids) > 1:
        raise ConfigMismatch(
            f"ple_layer_ids: found {ple.layer_ids}, required one layer in a GGUF file"
        )
    return metadata | {
        "ple.layers": list(ple.layer_ids),
        "ple.ngram_size": ple.ngram_size,
        "ple.heads_per_ngram": ple.heads_per_ngram,
        "ple.conv_kernel": ple.conv_width,
        "ple.eos_token_id": ple.eos_id,
        "ple.layer_multipliers": list(ple.multipliers(0)),
        "ple.head_offsets": list(ple.head_offsets(0)),
        "ple.head_vocab_sizes": list(ple.head_vocab_sizes(0)),
        "embedding_length_per_layer_input": ple.head_dim,
    }


def hash_constants(metadata: Mapping[str, Any]) -> dict[str, list[int]]:
    """Hash constants by their checkpoint names within a PLE module; empty for a model without one."""
    names = {
        "layer_multipliers": "ple.layer_multipliers",
        "ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
        "ngram_heads_offsets": "ple.head_offsets",
    }
    if f"{ARCHITECTURE}.ple.layers" not in metadata:
        return {}
    keys = _Keys(metadata)
    return {name: [int(v) for v in keys(key)] for name, key in names.items()}


class _Keys:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def __call__(self, key: str) -> Any:
        full = f"{ARCHITECTURE}.{key}"
        if full not in self._metadata:
            raise ConfigMismatch(f"{full}: found no such key, required in the file's metadata")
        return self._metadata[full]


def _rope(keys: _Keys, head_dim: int) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": _shortest(keys("rope.freq_base")),
        "partial_rotary_factor": keys("rope.dimension_count") / head_dim,
    }


def _ple(metadata: Mapping[str, Any], keys: _Keys, table_rows: int | None) -> dict[str, Any]:
    layers = metadata.get(f"{ARCHITECTURE}.ple.layers")
    if not layers:
        return {}
    sizes = [int(n) for n in keys("ple.head_vocab_sizes")]
    rows = sum(sizes) if table_rows is None else table_rows
    usual = -(-sum(sizes) // _USUAL_TABLE_MULTIPLE) * _USUAL_TABLE_MULTIPLE
    heads = (keys("ple.ngram_size") - 1) * keys("ple.heads_per_ngram")
    return {
        "ple_layer_ids": [int(layer) + 1 for layer in layers],
        "ple_embed_dim": keys("embedding_length_per_layer_input") * heads,
        "ple_conv_kernel_size": keys("ple.conv_kernel"),
        "ngram_size": keys("ple.ngram_size"),
        "heads_per_ngram": keys("ple.heads_per_ngram"),
        "ngram_vocab_size_base": sizes[0],
        "make_ngram_vocab_size_divisible_by": _USUAL_TABLE_MULTIPLE if rows == usual else rows,
        "split_ngram_parts": 1,
        "eos_token_id": keys("ple.eos_token_id"),
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is this fp32 number: metadata holds 1e-6 as 9.99999997e-07."""
    return float(str(np.float32(value)))
