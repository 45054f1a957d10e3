"""RMS norms of the family (model.md 1.2): computed in fp32, returned in the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6


class ZeroCentredNorm:
    """factor * x * rsqrt(mean(x^2) + eps) * (1 + w) over groups of `group` columns.

    weight: [columns], as stored (without the 1). Input [..., columns] of any float dtype.
    """

    __slots__ = ("_eps", "_group", "_scale")

    def __init__(
        self, weight: Tensor, *, eps: float, group: int | None = None, factor: float = 1.0
    ) -> None:
        self._scale = (weight.to(torch.float32) + 1.0) * factor
        self._eps = eps
        self._group = group or weight.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as held."""
        return self._scale.numel() * self._scale.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        if self._group != x.shape[-1]:
            wide = wide.view(*x.shape[:-1], -1, self._group)
        normed = F.rms_norm(wide, (self._group,), None, self._eps)
        return normed.view(x.shape).mul_(self._scale).to(x.dtype)


def l2_normalized(x: Tensor) -> Tensor:
    """x * rsqrt(sum(x^2) + 1e-6) over the last axis, for fp32 x (model.md 1.2, L2)."""
    width = x.shape[-1]
    # An RMS norm but for a factor: the sum is the mean times the width.
    return F.rms_norm(x, (width,), None, L2_EPS / width).mul_(width**-0.5)
