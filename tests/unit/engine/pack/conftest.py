"""A small model in a GGUF file whose tensors are random blocks of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.model_spec import ModelSpec, spec_from_config
from engine.sources import ggml_types as types
from engine.sources.ggml_names import TABLE_NAME, NameMap
from engine.sources.gguf_metadata import metadata_from_spec
from engine.sources.gguf_writer import add_metadata
from tests.unit.engine.real_config import REAL_TEXT_CONFIG

SMALL: dict[str, Any] = {
    **REAL_TEXT_CONFIG,
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "hc_count": 2,
    "hc_lowrank": 32,
    "indexer_head_dim": 64,
    "ple_embed_dim": 512,
    "ngram_vocab_size_base": 30,
    "make_ngram_vocab_size_divisible_by": 8,
    "eos_token_id": 3,
}
MATRICES = (
    *(types.Q8_0, types.Q4_0, types.Q5_0, types.IQ4_NL, types.BF16, types.F16, types.Q4_K),
    *(types.Q6_K, types.IQ2_XXS, types.IQ3_S, types.IQ4_XS),
)
EXPERTS = {
    0: (types.IQ2_XS, types.IQ4_NL),
    1: (types.IQ2_XXS, types.Q8_0),
    2: (types.IQ3_XXS, types.Q6_K),
    3: (types.BF16, types.F32),
    4: (types.Q8_0, types.Q8_0),
}
"""Gate and up, and down, by layer; the last is the draft layer."""


def small_spec() -> ModelSpec:
    return spec_from_config(SMALL, name="small")


def kind_of(name: str, shape: tuple[int, ...], number: int) -> types.GgmlType:
    if len(shape) == 1 or "conv1d" in name:
        return types.F32
    if name.endswith("_exps.weight"):
        gate_up, down = EXPERTS[int(name.split(".")[1])]
        return down if "down" in name else gate_up
    if name == TABLE_NAME:
        return types.Q4_0
    kind = MATRICES[number % len(MATRICES)]
    return kind if shape[-1] % kind.block_values == 0 else types.BF16


def random_data(kind: types.GgmlType, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Random values in float types, random blocks with small factors in others."""
    generator = torch.Generator().manual_seed(len(name) + sum(shape))
    floats = {types.F32: torch.float32, types.F16: torch.float16, types.BF16: torch.bfloat16}
    if kind in floats:
        values = torch.randn(shape, generator=generator) * 0.1
        values = -values.abs() - 0.01 if name.endswith("ssm_a") else values
        return values.to(floats[kind]).view(-1).view(torch.uint8).numpy()
    count = kind.num_bytes(shape) // kind.block_bytes
    blocks = torch.randint(0, 256, (count, kind.block_bytes), generator=generator).to(torch.uint8)
    small = torch.full((count, 1), 0.01, dtype=torch.float16).view(torch.uint8)
    for at in {types.Q6_K: (208,), types.Q4_K: (0, 2)}.get(kind, (0,)):
        blocks[:, at : at + 2] = small
    return blocks.flatten().numpy()


@pytest.fixture(scope="session")
def quantised_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = small_spec()
    file = tmp_path_factory.mktemp("quantised") / "small.gguf"
    writer = gguf.GGUFWriter(file, "qwen4exp")
    add_metadata(writer, {f"qwen4exp.{k}": v for k, v in metadata_from_spec(spec).items()})
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen35")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(64)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 64)
    writer.add_array("tokenizer.ggml.merges", ["t 1"])
    data: list[np.ndarray] = []
    for number, tensor in enumerate(NameMap(spec).file_tensors()):
        kind = kind_of(tensor.name, tensor.shape, number)
        data.append(random_data(kind, tensor.shape, tensor.name))
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),
            data[-1].nbytes,
            raw_dtype=gguf.GGMLQuantizationType(kind.number),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor_data in data:
        writer.write_tensor_data(tensor_data)
    writer.close()
    return file
