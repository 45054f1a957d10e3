"""Products of a few rows with a large bf16 weight, and what follows at once: a store, or adding to the streams.

Every program reads its rows of the weight once, whatever the number of input rows, and sums along K in one order.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import LAUNCH, mma, row_tile, wait

_MAX_TILES = 1024
_PARTIAL_VALUES = 256 * 64 * 64
"""Programs, rows and columns of a tile."""


@triton.jit(do_not_specialize=["R"])
def _product(
    x,
    w,
    out,
    streams,
    inject,
    partial,
    counters,
    R,
    N,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    SPLITS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STREAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out [R, N] = x [R, K] w^T [N, K]; or, with STREAMS > 0, streams [R, S*N] += inject [R, S] (x) that.

    Grid (tiles of N, tiles of R, pieces of K). With several pieces, a tile's last program adds them up, in order.
    """
    tile = tl.program_id(0)
    piece = tl.program_id(2)
    n = tile * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = piece * PIECE + tl.arange(0, BK)
    rows = n[:, None].to(tl.int64) * K
    # The first weights come while the kernel before still runs.
    w0 = tl.load(w + rows + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
    wait(OVERLAP)
    x0 = tl.load(
        x + m[None, :] * K + k[:, None], mask=(m[None, :] < R) & (k[:, None] < K), other=0.0
    )
    acc = mma(w0, x0, tl.zeros([BN, BM], tl.float32))
    for first in range(BK, PIECE, BK):
        c = first + k
        wt = tl.load(w + rows + c[None, :], mask=(n[:, None] < N) & (c[None, :] < K), other=0.0)
        xt = tl.load(
            x + m[None, :] * K + c[:, None], mask=(m[None, :] < R) & (c[:, None] < K), other=0.0
        )
        acc = mma(wt, xt, acc)
    done = True
    if SPLITS > 1:
        tiles = tl.num_programs(0)
        own = (tile * BN + tl.arange(0, BN))[:, None] * BM + tl.arange(0, BM)[None, :]
        stride = tiles * BN * BM
        tl.store(partial + piece * stride + own, acc)
        tl.debug_barrier()
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if done:
            tl.debug_barrier()
            acc = tl.zeros([BN, BM], tl.float32)
            for j in tl.static_range(SPLITS):
                acc += tl.load(partial + j * stride + own, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if done:
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


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut. piece: columns of one program, a multiple of bk."""

    bn: int
    bk: int
    piece: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ProductScratch:
    """Where the pieces of products meet; counters are zero between launches."""

    partial: Tensor
    counters: Tensor

    @staticmethod
    def make(device: torch.device) -> ProductScratch:
        """Enough for every tiling of `tiling`."""
        return ProductScratch(
            partial=torch.empty(_PARTIAL_VALUES, device=device),
            counters=torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
        )


def tiling(n: int, k: int) -> Tiling:
    """Enough programs to fill the chip, whatever the rows: large weights cut by rows, small ones by columns too."""
    if n >= 8192 or k < 1024:
        return Tiling(64 if n >= 8192 else 16, 128, -(-k // 128) * 128, 4, 4)
    pieces = max(1, min(k // 512, 144 // -(-n // 64)))
    piece = -(-k // (pieces * 128)) * 128
    return Tiling(64, 128, piece, 4, 4)


def product(x: Tensor, w: Tensor, out: Tensor, scratch: ProductScratch) -> Tensor:
    """out [R, N] (bf16 or fp32, written whole) = x bf16 [R, K] times w bf16 [N, K] transposed; rows contiguous."""
    launch(x, w, out, None, None, scratch, tiling(*w.shape))
    return out


def product_into_streams(
    x: Tensor,
    w: Tensor,
    streams: Tensor,
    inject: Tensor,
    scratch: ProductScratch,
) -> None:
    """streams [R, S*N] += outer(inject [R, S], x w^T), in place."""
    launch(x, w, streams, streams, inject, scratch, tiling(*w.shape))


def launch(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    streams: Tensor | None,
    inject: Tensor | None,
    scratch: ProductScratch,
    cut: Tiling,
) -> None:
    """One launch with a given tiling."""
    num_rows = x.shape[0]
    n, k = w.shape
    splits = triton.cdiv(k, cut.piece)
    bm = min(row_tile(num_rows), 64)
    row_tiles = triton.cdiv(num_rows, bm)
    if row_tiles > 1 and splits > 1:
        # The counters know one tile of rows.
        cut, splits = Tiling(16, cut.bk, triton.cdiv(k, cut.bk) * cut.bk, cut.warps, cut.stages), 1
    _product[(triton.cdiv(n, cut.bn), row_tiles, splits)](
        x,
        w,
        out,
        streams if streams is not None else out,
        inject if inject is not None else x,
        scratch.partial,
        scratch.counters,
        num_rows,
        n,
        K=k,
        PIECE=cut.piece,
        SPLITS=splits,
        BN=cut.bn,
        BM=bm,
        BK=cut.bk,
        STREAMS=0 if inject is None else inject.shape[1],
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(cut.warps, cut.stages),
    )


def product_reference(x: Tensor, w: Tensor) -> Tensor:
    """fp32 x w^T."""
    return x.to(torch.float32) @ w.to(torch.float32).t()
