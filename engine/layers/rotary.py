"""Rotary position embedding on the first dims of a head, half-split form (model.md 1.5). Text positions only."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """cos and sin of every position, computed in fp32 and kept in `dtype`.

    cos, sin: [positions, rotary_dim], the second half repeating the first.
    """

    __slots__ = ("cos", "rotary_dim", "sin")

    def __init__(
        self,
        *,
        rotary_dim: int,
        theta: float,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rotary_dim = rotary_dim
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32)
        frequencies = 1.0 / (theta ** (steps / rotary_dim))
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = angles.cos().to(device, dtype)
        # The sign of rotate_half is folded in here, so applying needs one roll and no negation.
        sign = torch.ones(rotary_dim)
        sign[: rotary_dim // 2] = -1.0
        self.sin = (angles.sin() * sign).to(device, dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of both tables."""
        return 2 * self.cos.numel() * self.cos.element_size()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, rotary_dim] of int64 positions [T]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dims of x [T, H, D] by cos, sin [T, rotary_dim] of `RotaryTable.at`; returns a new tensor."""
    dim = cos.shape[-1]
    turned = x[..., :dim]
    turned = turned * cos[:, None] + turned.roll(dim // 2, -1) * sin[:, None]
    if dim == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., dim:]), dim=-1)
