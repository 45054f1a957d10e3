"""The four norms of the model (model.md 1.2), in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


def zero_centred_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, times (1 + weight)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def grouped_zero_centred_rms(x: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """Each of `num_groups` equal parts of the last axis is normed by its own mean square; x [..., G*H]."""
    grouped = x.unflatten(-1, (num_groups, -1))
    return zero_centred_rms(grouped, weight.view(num_groups, -1), eps).flatten(-2)


def gated_rms(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_type: str) -> Tensor:
    """RMS norm over the last axis, times weight (plain), times the activated gate."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    activation = torch.sigmoid(gate) if gate_type == "sigmoid" else gate * torch.sigmoid(gate)
    return normed * weight * activation


def l2(x: Tensor) -> Tensor:
    """Unit length over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
