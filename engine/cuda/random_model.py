"""A model of the real geometry with random weights, for measuring and for comparing kernels with the torch layers.

The n-gram table is made small: its rows are gathered, never multiplied, so its size changes no time but that of
loading.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.cuda.quant import QUARTER, Packed4, pack4, packed_shape, unpack4
from engine.model_spec import ModelSpec, spec_from_config

if TYPE_CHECKING:
    from collections.abc import Callable

REAL_CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
    "eos_token_id": 248044,
    "mtp_num_hidden_layers": 1,
}


def real_spec(**changes: Any) -> ModelSpec:
    """The real geometry but for the n-gram table's size, with changes to its config."""
    return spec_from_config({**REAL_CONFIG, **changes}, name="random")


class RandomTensors:
    """Stands in for engine.weights.Checkpoint: every tensor random from its name, so two loaders get the same.

    Expert weights are exactly representable in 4 bits, so torch layers and kernels hold the same model.
    """

    trunk = "model."

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def has(self, name: str) -> bool:
        """Experts are fused, the table is whole, hash constants are not stored."""
        return name.endswith(("gate_up_proj", "down_proj", "ngram_embedding.weight"))

    def finish(self, *, ignore: tuple[str, ...] = ()) -> None:
        """Nothing is left over."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """bf16 values of about the size a trained model has; experts fp32."""
        normal = self._normal(name, shape)
        if name.endswith("linear_attn.norm.weight"):
            return 1.0 + 0.3 * normal
        if name.endswith("A_log"):
            return normal * 0.7
        if name.endswith("dt_bias"):
            return normal - 1.0
        if "norm" in name.rsplit(".", 2)[-2]:
            return 0.3 * normal
        if name.endswith("conv1d.weight"):
            return 0.5 * normal
        if "embed_tokens" in name or "ngram_embedding" in name:
            return normal
        normal *= shape[-1] ** -0.5
        if len(shape) < 3:
            return normal
        for run in normal.split(64):
            run.copy_(unpack4(pack4(run), *shape[1:]))
        return normal

    def take_into(self, name: str, target: Tensor) -> None:
        """As `take`, copied to a tensor of the required shape."""
        target.copy_(self.take(name, tuple(target.shape)))

    def take_each(self, name: str, shape: tuple[int, ...]) -> Callable[[int], Tensor]:
        """As `take`, by index on the first axis."""
        whole = self.take(name, shape)
        return lambda index: whole[index]

    def packed_experts(self, name: str, shape: tuple[int, ...]) -> Packed4:
        """Random words and one plausible scale: for timing, without making the weights they stand for."""
        count, rows, columns = shape
        scales = packed_shape(count, rows, columns)
        words = torch.randint(
            -(1 << 15),
            1 << 15,
            (*scales, QUARTER),
            dtype=torch.int16,
            device=self._device,
            generator=self._generator(name),
        )
        plausible = shape[-1] ** -0.5 / 4.6
        return Packed4(
            words=words,
            scales=torch.full(scales, plausible, dtype=torch.bfloat16, device=self._device),
        )

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = torch.float32 if len(shape) == 3 or len(shape) == 1 else torch.bfloat16
        return torch.randn(shape, dtype=dtype, device=self._device, generator=self._generator(name))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
