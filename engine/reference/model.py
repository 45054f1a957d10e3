"""The trunk from ids to logits, recomputed from the first token at every call (model.md 1.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

Sublayer = Callable[[Tensor, Weights, ReferenceConfig], Tensor]


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
    if is_attention:
        mixing: Sublayer = sparse_attention
        name = "self_attn"
    else:
        mixing, name = gated_delta_net, "linear_attn"
    streams = _sublayer(
        streams, mixing, under(layer, name), under(layer, "attn_hyper_connection"), config
    )
    return _sublayer(
        streams,
        mixture_of_experts,
        under(layer, "mlp"),
        under(layer, "mlp_hyper_connection"),
        config,
    )


def _sublayer(
    streams: Tensor, sublayer: Sublayer, weights: Weights, hyper: Weights, config: ReferenceConfig
) -> Tensor:
    output = sublayer(residual.read(streams, hyper, config), weights, config)
    return residual.inject(streams, output, hyper, config)
