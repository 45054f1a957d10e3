"""Gated residual for a window's rows (model.md 1.3): three kernels from the streams to the mixed row.

The first multiplies the un-normed streams and leaves the norm to the second, where it is one number per row and stream:
so that the columns can be cut into slices that many programs read at once.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import (
    LAUNCH,
    early,
    held,
    mma,
    row_tile,
    sigmoid,
    start,
    two_parts,
    wait,
)
from engine.cuda.products import PIECE_TILE, equal_pieces, multiply_pieces, padded_outputs

_UP_TILE = 16


@dataclass(frozen=True, slots=True)
class ResidualWeights:
    """scale fp32 [S*H] = (1 + w) / S; down bf16 [rank + S padded to 8, or rank, S*H], columns times scale, injection
    rows halved; up bf16 [S*H, rank]."""

    scale: Tensor
    down: Tensor
    up: Tensor
    rank: int
    num_streams: int
    eps: float

    @property
    def has_inject(self) -> bool:
        """Whether there are injection rows."""
        return self.down.shape[0] > self.rank

    @property
    def num_bytes(self) -> int:
        """Bytes of the three."""
        return sum(t.numel() * t.element_size() for t in (self.scale, self.down, self.up))


@dataclass(frozen=True, slots=True)
class ResidualScratch:
    """Buffers of one reading, for up to `max_rows` rows; contents do not matter before."""

    partial: Tensor
    low: Tensor
    root: Tensor

    @staticmethod
    def make(
        hidden: int, num_streams: int, rank: int, max_rows: int, device: torch.device
    ) -> ResidualScratch:
        """Buffers for one geometry."""
        rows = row_tile(max_rows)
        slices = num_streams * equal_pieces(hidden)
        return ResidualScratch(
            partial=torch.empty(slices, rows, padded_outputs(rank + num_streams), device=device),
            low=torch.empty(max_rows, rank, dtype=torch.bfloat16, device=device),
            root=torch.empty(max_rows, num_streams, device=device),
        )


@triton.jit
def _join(
    x,
    partial,
    low,
    root,
    inject,
    eps,
    H: tl.constexpr,
    S: tl.constexpr,
    RANK: tl.constexpr,
    NOUT: tl.constexpr,
    NPAD: tl.constexpr,
    SLICES: tl.constexpr,
    PS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (output tiles, rows): adds the slices up, each times its stream's norm; then SiLU or the gate.

    The norms come from the streams themselves while the kernel before still multiplies these: it writes none of them.
    """
    start(OVERLAP)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1)
    s = tl.arange(0, S)
    h = tl.arange(0, BH)
    squares = tl.zeros([S, BH], tl.float32)
    own = x + row * (S * H) + s[:, None] * H
    for first in tl.static_range(0, H, BH):
        c = first + h[None, :]
        value = early(own + c, c < H, 0.0).to(tl.float32)
        squares += value * value
    r = tl.rsqrt(tl.sum(squares, 1) / H + eps)
    j = tl.arange(0, PS)
    q = s[:, None] * SLICES + j[None, :]
    used = (j < SLICES)[None, :, None]
    wait(OVERLAP)
    at = (q[:, :, None] * BM + row) * NPAD + n[None, None, :]
    streams = tl.sum(tl.load(partial + at, mask=used, other=0.0), 1)
    value = tl.sum(streams * r[:, None], 0).to(tl.bfloat16).to(tl.float32)
    tl.store(low + row * RANK + n, value * sigmoid(value), mask=n < RANK)
    if NOUT > RANK:
        # 1 + tanh(x) = 2 sigmoid(2x); the weight's rows are halved already.
        tl.store(
            inject + row * S + n - RANK, 2.0 * sigmoid(2.0 * value), mask=(n >= RANK) & (n < NOUT)
        )
    tl.store(root + row * S + s, r)


@triton.jit(do_not_specialize=["R"])
def _up(
    x,
    scale,
    w,
    low,
    root,
    out,
    R,
    H: tl.constexpr,
    S: tl.constexpr,
    RANK: tl.constexpr,
    BH: tl.constexpr,
    BM: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of columns): out [R, H] = sum over streams of sigmoid(low w^T) times the normed stream."""
    j = tl.arange(0, S * BH)
    h = tl.program_id(0) * BH + j % BH
    rows = j // BH * H + tl.minimum(h, H - 1)
    m = tl.arange(0, BM)
    k1 = tl.arange(0, K1)
    w1 = tl.load(w + rows[:, None] * RANK + k1[None, :], mask=k1[None, :] < RANK, other=0.0)
    if K2 > 0:
        k2 = K1 + tl.arange(0, K2)
        w2 = tl.load(w + rows[:, None] * RANK + k2[None, :], mask=k2[None, :] < RANK, other=0.0)
    factor = tl.load(scale + rows)
    in_rows = m[None, :] < R
    inside = in_rows & (h[:, None] < H)
    # The streams are older than the two kernels before this one: `_join`, which lets it start, and their product.
    stream = early(x + m[None, :] * (S * H) + rows[:, None], inside, 0.0).to(tl.float32)
    stream *= factor[:, None]
    wait(OVERLAP)
    x1 = tl.load(
        low + m[None, :] * RANK + k1[:, None], mask=in_rows & (k1[:, None] < RANK), other=0.0
    )
    if K2 > 0:
        x2 = tl.load(
            low + m[None, :] * RANK + k2[:, None], mask=in_rows & (k2[:, None] < RANK), other=0.0
        )
    r = tl.load(root + m[None, :] * S + (j // BH)[:, None], mask=inside, other=0.0)
    acc = mma(held(w1), x1, tl.zeros([S * BH, BM], tl.float32))
    if K2 > 0:
        acc = mma(held(w2), x2, acc)
    mixed = sigmoid(acc) * (stream * r)
    total = tl.sum(mixed.reshape(S, BH, BM), 0)
    own = tl.program_id(0) * BH + tl.arange(0, BH)
    tl.store(out + m[None, :] * H + own[:, None], total, mask=(m[None, :] < R) & (own[:, None] < H))


def read_streams(
    streams: Tensor,
    weights: ResidualWeights,
    scratch: ResidualScratch,
    out: Tensor,
    inject: Tensor | None,
) -> None:
    """streams bf16 [R, S*H] -> out bf16 [R, H] and, unless None, injection weights inject bf16 [R, S]."""
    num_rows, width = streams.shape
    s = weights.num_streams
    hidden = width // s
    slices = equal_pieces(hidden)
    num_out = weights.rank + (s if weights.has_inject else 0)
    rows = row_tile(num_rows)
    padded = padded_outputs(num_out)
    first, rest = two_parts(weights.rank)
    multiply_pieces(streams, weights.down, s * slices, scratch.partial)
    _join[(padded // PIECE_TILE, num_rows)](
        streams,
        scratch.partial,
        scratch.low,
        scratch.root,
        inject if inject is not None else scratch.low,
        weights.eps,
        H=hidden,
        S=s,
        RANK=weights.rank,
        NOUT=num_out,
        NPAD=padded,
        SLICES=slices,
        PS=triton.next_power_of_2(slices),
        BN=PIECE_TILE,
        BM=rows,
        BH=min(1024, triton.next_power_of_2(hidden)),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
    _up[(triton.cdiv(hidden, _UP_TILE),)](
        streams,
        weights.scale,
        weights.up,
        scratch.low,
        scratch.root,
        out,
        num_rows,
        H=hidden,
        S=s,
        RANK=weights.rank,
        BH=_UP_TILE,
        K1=first,
        K2=rest,
        BM=rows,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
