"""Products of a few rows with a large bf16 weight, and what follows at once: a store, or adding to the streams.

Every program reads its rows of the weight once, whatever the number of input rows, and sums along K in one order. Small
weights are cut into pieces along K, whose sums the kernel after adds up.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import LAUNCH, early, held, mma, row_tile, wait

_MAX_TILES = 1024
_PARTIAL_VALUES = 256 * 64 * 64
"""Programs, rows and columns of a tile."""
PIECE_TILE = 32
"""Outputs of one program of `multiply_pieces`."""
_MAX_PIECE = 512


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
    inside = (m[None, :] < R) & (n[:, None] < N)
    if STREAMS > 0:
        # Streams and weights of injection are older than what x was made from, and so than the last two kernels.
        s = tl.arange(0, STREAMS)
        at = streams + m[None, None, :] * (STREAMS * N) + s[:, None, None] * N + n[None, :, None]
        old = early(at, inside[None, :, :], 0.0)
        weight = early(inject + m[None, :] * STREAMS + s[:, None], m[None, :] < R, 0.0)
    wait(OVERLAP)
    x0 = tl.load(
        x + m[None, :] * K + k[:, None], mask=(m[None, :] < R) & (k[:, None] < K), other=0.0
    )
    acc = tl.zeros([BN, BM], tl.float32)
    for first in range(BK, PIECE, BK):
        c = first + k
        wt = tl.load(w + rows + c[None, :], mask=(n[:, None] < N) & (c[None, :] < K), other=0.0)
        xt = tl.load(
            x + m[None, :] * K + c[:, None], mask=(m[None, :] < R) & (c[:, None] < K), other=0.0
        )
        acc = mma(wt, xt, acc)
    # Last, so that the loads of all others follow these at once.
    acc = mma(held(w0), held(x0), acc)
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
        if STREAMS == 0:
            tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], acc, mask=inside)
        else:
            y = acc.to(tl.bfloat16).to(tl.float32)
            added = weight.to(tl.float32)[:, None, :] * y[None, :, :]
            tl.store(at, old.to(tl.float32) + added, mask=inside[None, :, :])


@triton.jit(do_not_specialize=["R"])
def _pieces(
    x,
    w,
    partial,
    R,
    N: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of N, pieces of K): partial fp32 [pieces, BM, tiles*BN] of x [R, K] w^T [N, K].

    A program asks for all its weights before it waits, and sums four runs of its columns beside each other.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    piece = tl.program_id(1)
    m = tl.arange(0, BM)
    k = piece * PIECE + tl.arange(0, BK)
    end = (piece + 1) * PIECE
    w0 = _columns(w, n, k, N, end, K)
    w1 = _columns(w, n, k + BK, N, end, K)
    w2 = _columns(w, n, k + 2 * BK, N, end, K)
    w3 = _columns(w, n, k + 3 * BK, N, end, K)
    wait(OVERLAP)
    x0 = _inputs(x, m, k, R, end, K)
    x1 = _inputs(x, m, k + BK, R, end, K)
    x2 = _inputs(x, m, k + 2 * BK, R, end, K)
    x3 = _inputs(x, m, k + 3 * BK, R, end, K)
    x0 = held(x0)
    x1 = held(x1)
    x2 = held(x2)
    x3 = held(x3)
    w0 = held(w0)
    w1 = held(w1)
    w2 = held(w2)
    w3 = held(w3)
    none = tl.zeros([BN, BM], tl.float32)
    acc = (mma(w0, x0, none) + mma(w1, x1, none)) + (mma(w2, x2, none) + mma(w3, x3, none))
    at = (piece * BM + m[None, :]) * (tl.num_programs(0) * BN) + n[:, None]
    tl.store(partial + at, acc, mask=m[None, :] < R)


@triton.jit
def _columns(w, n, k, N, end, K: tl.constexpr):
    inside = (n[:, None] < N) & (k[None, :] < end)
    return tl.load(w + n[:, None] * K + k[None, :], mask=inside, other=0.0)


@triton.jit
def _inputs(x, m, k, R, end, K: tl.constexpr):
    inside = (m[None, :] < R) & (k[:, None] < end)
    return tl.load(x + m[None, :] * K + k[:, None], mask=inside, other=0.0)


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


def equal_pieces(width: int) -> int:
    """How many equal pieces of a width, none longer than a program can hold."""
    return next(n for n in range(1, width + 1) if width % n == 0 and width // n <= _MAX_PIECE)


def padded_outputs(num_outputs: int) -> int:
    """Whole tiles of outputs: the last axis of what `multiply_pieces` writes."""
    return -(-num_outputs // PIECE_TILE) * PIECE_TILE


def multiply_pieces(x: Tensor, w: Tensor, num_pieces: int, partial: Tensor) -> None:
    """x bf16 [R, K] times w bf16 [N, K] transposed, by equal pieces of K, R at most one row tile.

    partial: fp32 [num_pieces, row_tile(R), padded_outputs(N)], or room for it; only R rows are written.
    """
    num_rows, k = x.shape
    n = w.shape[0]
    piece = k // num_pieces
    _pieces[(triton.cdiv(n, PIECE_TILE), num_pieces)](
        x,
        w,
        partial,
        num_rows,
        N=n,
        K=k,
        PIECE=piece,
        BN=PIECE_TILE,
        BM=row_tile(num_rows),
        BK=max(16, triton.next_power_of_2(triton.cdiv(piece, 4))),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )


def product_reference(x: Tensor, w: Tensor) -> Tensor:
    """fp32 x w^T."""
    return x.to(torch.float32) @ w.to(torch.float32).t()
