"""The gated residual over several streams (model.md 1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.reference.norm import grouped_zero_centred_rms

if TYPE_CHECKING:
    from engine.reference.config import ReferenceConfig
    from engine.reference.weights import Weights


def read(streams: Tensor, weights: Weights, config: ReferenceConfig) -> Tensor:
    """One input for a sublayer out of all streams. streams [T, hc*H] -> [T, H]."""
    normed = _normed(streams, weights, config)
    down = normed @ weights["input_mix_weight_down.weight"].T
    mix = torch.sigmoid(F.silu(down / config.hc_count) @ weights["input_mix_weight_up.weight"].T)
    return (mix * normed).unflatten(-1, (config.hc_count, -1)).mean(-2)


def inject(streams: Tensor, output: Tensor, weights: Weights, config: ReferenceConfig) -> Tensor:
    """Streams plus a sublayer's output, weighted per stream by what the streams were before the sublayer.

    streams [T, hc*H], output [T, H] -> [T, hc*H].
    """
    normed = _normed(streams, weights, config)
    strength = 2 * torch.sigmoid(normed @ weights["block_inject_weight.weight"].T / config.hc_count)
    return streams + (strength[:, :, None] * output[:, None, :]).flatten(1)


def _normed(streams: Tensor, weights: Weights, config: ReferenceConfig) -> Tensor:
    return grouped_zero_centred_rms(
        streams, weights["hc_norm.weight"], config.rms_norm_eps, config.hc_count
    )
