"""RMS norms of the family (model.md 1.2): computed in fp32, returned in the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


class ZeroCentredNorm:
    """x * rsqrt(mean(x^2) + eps) * (1 + w) over groups of `group` columns.

    weight: [columns], as stored (without the 1). Input [..., columns] of any float dtype.
    """

    __slots__ = ("_eps", "_group", "_scale")

    def __init__(self, weight: Tensor, *, eps: float, group: int | None = None) -> None:
        self._scale = weight.to(torch.float32) + 1.0
        self._eps = eps
        self._group = group or weight.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as held."""
        return self._scale.numel() * self._scale.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        groups = wide.unflatten(-1, (-1, self._group))
        mean = (groups * groups).sum(-1, keepdim=True).mul_(1.0 / self._group)
        normed = (groups * torch.rsqrt(mean.add_(self._eps))).flatten(-2)
        return (normed * self._scale).to(x.dtype)


def l2_normalized(x: Tensor) -> Tensor:
    """x / |x| over the last axis in fp32 (model.md 1.2, L2)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
