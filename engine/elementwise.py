"""Elementwise functions whose value never depends on where an element lies in memory (product.md D3, rule 1).

torch computes sigmoid, SiLU and softplus of a tensor's last few elements by scalar code that rounds differently
from the vector code before it, so a row's value could follow the number of rows beside it. Rows of whole vectors have
no such rest; others are composed of exp, log1p and single-rounding operations, which agree everywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.linear import MAX_WINDOW_ROWS

_VECTOR_PAIR_BYTES = 128
"""torch's vector loops step by two vectors, of 64 bytes at most."""
_PARALLEL_GRAIN = 32768
"""Larger tensors are split among threads at borders that need not be whole vectors."""


def _no_rest(x: Tensor) -> bool:
    width = x.shape[-1]
    whole = width * x.element_size() % _VECTOR_PAIR_BYTES == 0
    return whole and width * MAX_WINDOW_ROWS <= _PARALLEL_GRAIN and x.stride(-1) == 1


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), same shape and dtype."""
    if _no_rest(x) or x.device.type != "cpu":
        return torch.sigmoid(x)
    return _sigmoid(x.to(torch.float32)).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), same shape and dtype."""
    if _no_rest(x) or x.device.type != "cpu":
        return F.silu(x)
    wide = x.to(torch.float32)
    return _sigmoid(wide).mul_(wide).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) for fp32 x, without overflow."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp_min(0.0))


def _sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1.0).reciprocal_()
