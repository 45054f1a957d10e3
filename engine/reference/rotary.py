"""Rotary positions: half-split rotation of the first `rotary_dim` columns of a head (model.md 1.5), text only."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """Turn heads to their positions.

    x [T, heads, D] with D >= rotary_dim; positions [T]. Columns from rotary_dim on pass through.
    """
    half = rotary_dim // 2
    exponents = torch.arange(half, dtype=torch.float32) * 2 / rotary_dim
    angles = positions.to(torch.float32)[:, None] * theta**-exponents
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
