"""Products of a few rows with a large bf16 weight, and what follows at once: a store, or adding to the streams.

Every program reads its rows of the weight once, whatever the number of input rows, and sums along K in one order.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.primitives import LAUNCH, begin, mma, prefetch, row_tile, wait

_LINE = 64
"""bf16 values in a 128-byte line."""


@triton.jit(do_not_specialize=["R"])
def _product(
    x, w, out, streams, inject,
    R, N,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    STREAMS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):
    """out [R, N] = x [R, K] w^T [N, K]; or, with STREAMS > 0, streams [R, S*N] += inject [R, S] (x) that."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    rows = n[:, None].to(tl.int64) * K
    begin(OVERLAP)
    lines = tl.arange(0, AHEAD) * 64
    prefetch(w + tl.minimum(rows, (N - 1).to(tl.int64) * K) + lines[None, :], OVERLAP)
    wait(OVERLAP)
    acc = tl.zeros([BN, BM], tl.float32)
    for first in range(0, K, BK):
        c = first + k
        wt = tl.load(w + rows + c[None, :], mask=(n[:, None] < N) & (c[None, :] < K), other=0.0)
        xt = tl.load(x + m[None, :] * K + c[:, None], mask=(m[None, :] < R) & (c[:, None] < K), other=0.0)
        acc = mma(wt, xt, acc)
    inside = (m[None, :] < R) & (n[:, None] < N)
    if STREAMS == 0:
        tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], acc, mask=inside)
    else:
        y = acc.to(tl.bfloat16).to(tl.float32)
        for s in tl.static_range(STREAMS):
            at = streams + m[None, :] * (STREAMS * N) + s * N + n[:, None]
            weight = tl.load(inject + m * STREAMS + s, mask=m < R, other=0.0).to(tl.float32)
            old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, old + weight[None, :] * y, mask=inside)


def _tiles(n: int, k: int) -> tuple[int, int, int, int]:
    """BN, BK, warps, stages: enough programs to fill the chip, none too small."""
    if n >= 8192:
        return 64, 128, 4, 4
    return 16, 256 if k >= 1024 else 128, 4, 4


def product(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """out [R, N] (bf16 or fp32, written whole) = x bf16 [R, K] times w bf16 [N, K] transposed; rows contiguous."""
    _launch(x, w, out, None, None)
    return out


def product_into_streams(x: Tensor, w: Tensor, streams: Tensor, inject: Tensor) -> None:
    """streams [R, S*N] += outer(inject [R, S], x w^T), in place."""
    _launch(x, w, streams, streams, inject)


def _launch(x: Tensor, w: Tensor, out: Tensor, streams: Tensor | None, inject: Tensor | None) -> None:
    num_rows = x.shape[0]
    n, k = w.shape
    bn, bk, warps, stages = _tiles(n, k)
    bm = min(row_tile(num_rows), 64)
    _product[(triton.cdiv(n, bn), triton.cdiv(num_rows, bm))](
        x, w, out, streams if streams is not None else out, inject if inject is not None else x,
        num_rows, n,
        K=k, BN=bn, BM=bm, BK=bk,
        STREAMS=0 if inject is None else inject.shape[1],
        AHEAD=min(8, triton.next_power_of_2(max(1, k // _LINE))),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(warps, stages),
    )


def product_reference(x: Tensor, w: Tensor) -> Tensor:
    """fp32 x w^T."""
    return x.to(torch.float32) @ w.to(torch.float32).t()
