"""Zero-centred RMS norm of whole rows."""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import LAUNCH, wait


@triton.jit
def _norm(
    x,
    weight,
    out,
    eps,
    W: tl.constexpr,
    GROUPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    P: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, groups of W columns)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, P)
    wait(OVERLAP)
    at = row * (GROUPS * W) + group * W + i
    value = tl.load(x + at, mask=i < W, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / W + eps)
    if WEIGHTED:
        value *= tl.load(weight + group * W + i, mask=i < W, other=0.0)
    tl.store(out + at, value, mask=i < W)


def norm_rows(x: Tensor, weight: Tensor | None, eps: float, num_groups: int = 1) -> Tensor:
    """x bf16 [T, W] normed over each of num_groups parts of its columns, times weight fp32 [W] if there is one."""
    out = torch.empty_like(x)
    width = x.shape[1] // num_groups
    _norm[(x.shape[0], num_groups)](
        x,
        weight if weight is not None else x,
        out,
        eps,
        W=width,
        GROUPS=num_groups,
        WEIGHTED=weight is not None,
        P=triton.next_power_of_2(width),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4 if width < 4096 else 8, 1),
    )
    return out
