"""The trunk from ids to logits, recomputed from the first token at every call (model.md 1.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.reference import residual
from engine.reference.config import ReferenceConfig
from engine.reference.gdn import gated_delta_net
from engine.reference.moe import mixture_of_experts
from engine.reference.ple import per_layer_embedding
from engine.reference.qsa import sparse_attention
from engine.reference.weights import Weights, as_float32, text_weights, under


class ReferenceModel:
    """A text model in fp32 from the tensors of its checkpoint."""

    def __init__(self, config: Mapping[str, Any] | ReferenceConfig, tensors: Weights) -> None:
        self.config = (
            config if isinstance(config, ReferenceConfig) else ReferenceConfig.from_dict(config)
        )
        weights = as_float32(tensors)
        trunk = text_weights(weights)
        self.embedding = trunk["embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.final = under(trunk, "hyper_connection_mixer")
        self.layers = [under(trunk, f"layers.{i}") for i in range(self.config.num_hidden_layers)]
        self.mtp = under(weights, "mtp")

    def forward(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [T, V] of every position, and the streams [T, hc*H] before the final mixer."""
        config = self.config
        streams = self.embedding[torch.tensor(ids)].repeat(1, config.hc_count)
        for index, layer in enumerate(self.layers):
            if index in config.ple_layers:
                streams = streams + per_layer_embedding(streams, ids, under(layer, "ple"), config)
            streams = decoder_layer(streams, layer, config, index in config.attention_layers)
        return self.logits(streams, self.final), streams

    def logits(self, streams: Tensor, mixer: Weights) -> Tensor:
        """Head over the mixed streams; the draft layer brings a mixer of its own."""
        return residual.read(streams, mixer, self.config) @ self.head.T


def decoder_layer(
    streams: Tensor, layer: Weights, config: ReferenceConfig, is_attention: bool
) -> Tensor:
    """Mix tokens, then mix channels, each read from and injected into the streams [T, hc*H]."""
    hyper = under(layer, "attn_hyper_connection")
    u = residual.read(streams, hyper, config)
    if is_attention:
        output = sparse_attention(u, under(layer, "self_attn"), config)
    else:
        output = gated_delta_net(u, under(layer, "linear_attn"), config)
    return mix_channels(residual.inject(streams, output, hyper, config), layer, config)


def last_row_of_attention_layer(streams: Tensor, layer: Weights, config: ReferenceConfig) -> Tensor:
    """What `decoder_layer` gives for the last row alone, of an attention layer. [T, hc*H] -> [1, hc*H]."""
    hyper = under(layer, "attn_hyper_connection")
    u = residual.read(streams, hyper, config)
    output = sparse_attention(u, under(layer, "self_attn"), config, first_query=len(u) - 1)
    return mix_channels(residual.inject(streams[-1:], output, hyper, config), layer, config)


def mix_channels(streams: Tensor, layer: Weights, config: ReferenceConfig) -> Tensor:
    """The layer's experts; no row sees another. streams [T, hc*H] -> [T, hc*H]."""
    hyper = under(layer, "mlp_hyper_connection")
    output = mixture_of_experts(residual.read(streams, hyper, config), under(layer, "mlp"), config)
    return residual.inject(streams, output, hyper, config)
