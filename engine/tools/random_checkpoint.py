"""A checkpoint with random bf16 weights at the widths of the large model, for measuring how weights load.

    python -m engine.tools.random_checkpoint DIR --layers 4 --experts 32

Vocabulary and n-gram table are kept small: they are one matrix each and say nothing that the experts do not say.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.geometry import TensorFact, model_tensors
from engine.model_spec import spec_from_config

_WIDTHS: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 8192,
    "hidden_size": 2560,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "output_gate_type": "sigmoid",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "indexer_n_heads": 4,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ngram_vocab_size_base": 4096,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 4,
    "eos_token_id": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
}


def write_checkpoint(directory: Path, *, num_layers: int, num_experts: int) -> int:
    """One safetensors file a layer, with an index; returns the bytes of all weights."""
    config = {**_WIDTHS, "num_hidden_layers": num_layers, "num_experts": num_experts}
    spec = spec_from_config(config, name=directory.name)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, (_, facts) in enumerate(groupby(model_tensors(spec), _layer_of)):
        tensors = {name: tensor for fact in facts for name, tensor in _random(fact)}
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return num_bytes


def _layer_of(fact: TensorFact) -> str:
    """What lies in one file."""
    prefix, _, rest = fact.name.partition("layers.")
    return f"{prefix}{rest.split('.')[0]}" if rest else fact.part


def _random(fact: TensorFact) -> Iterator[tuple[str, torch.Tensor]]:
    values = torch.empty(fact.shape, dtype=torch.bfloat16).normal_(std=0.02)
    if not fact.name.endswith("ngram_embedding.weight"):
        yield fact.name, values
        return
    stem = fact.name.removesuffix("weight")
    for number, shard in enumerate(values.chunk(_WIDTHS["split_ngram_parts"])):
        yield f"{stem}shard_{number}.weight", shard.contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.tools.random_checkpoint")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    write_checkpoint(
        arguments.directory, num_layers=arguments.layers, num_experts=arguments.experts
    )


if __name__ == "__main__":
    main()
