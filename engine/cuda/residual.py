"""Gated residual for a window's rows (model.md 1.3): three kernels from the streams to the mixed row.

The first multiplies the un-normed streams and leaves the norm's scale to the second, where it is one number per row and
stream: so that the columns can be cut into slices that many programs read at once.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import LAUNCH, mma, row_tile, sigmoid, two_parts, wait

_DOWN_TILE = 32
_UP_TILE = 16
_MAX_SLICE = 512


@dataclass(frozen=True, slots=True)
class ResidualWeights:
    """scale fp32 [S*H] = (1 + w) / S; down bf16 [rank + S padded to 8, or rank, S*H], injection rows halved;
    up bf16 [S*H, rank]."""

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
    squares: Tensor
    low: Tensor
    root: Tensor

    @staticmethod
    def make(
        hidden: int, num_streams: int, rank: int, max_rows: int, device: torch.device
    ) -> ResidualScratch:
        """Buffers for one geometry."""
        rows = row_tile(max_rows)
        slices = num_streams * num_slices(hidden)
        tiles = triton.cdiv(rank + num_streams, _DOWN_TILE)
        return ResidualScratch(
            partial=torch.empty(slices, tiles * _DOWN_TILE, rows, device=device),
            squares=torch.empty(slices, rows, device=device),
            low=torch.empty(max_rows, rank, dtype=torch.bfloat16, device=device),
            root=torch.empty(max_rows, num_streams, device=device),
        )


def num_slices(hidden: int) -> int:
    """Equal slices of one stream, none longer than a program can hold."""
    return next(n for n in range(1, hidden + 1) if hidden % n == 0 and hidden // n <= _MAX_SLICE)


@triton.jit(do_not_specialize=["R"])
def _down(
    x,
    scale,
    w,
    partial,
    squares,
    R,
    W: tl.constexpr,
    NOUT: tl.constexpr,
    SLICE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (output tiles, slices of all streams): partial fp32 [slices, NPAD, BM], squares fp32 [slices, BM].

    The weights are on their way before the streams are waited for.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    c = part * SLICE + k
    in_k = k < SLICE
    wt = tl.load(
        w + n[:, None] * W + c[None, :], mask=(n[:, None] < NOUT) & in_k[None, :], other=0.0
    )
    factor = tl.load(scale + c, mask=in_k, other=0.0)
    wait(OVERLAP)
    xt = tl.load(
        x + m[None, :] * W + c[:, None], mask=(m[None, :] < R) & in_k[:, None], other=0.0
    ).to(tl.float32)
    acc = mma(wt, (xt * factor[:, None]).to(tl.bfloat16), tl.zeros([BN, BM], tl.float32))
    NPAD: tl.constexpr = (NOUT + BN - 1) // BN * BN
    tl.store(partial + (part * NPAD + n[:, None]) * BM + m[None, :], acc)
    if tile == 0:
        tl.store(squares + part * BM + m, tl.sum(xt * xt, 0))


@triton.jit
def _join(
    partial,
    squares,
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
    OVERLAP: tl.constexpr,
):
    """Grid (output tiles, rows): adds the slices up, each times its stream's norm; then SiLU or the gate."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1)
    j = tl.arange(0, PS)
    q = tl.arange(0, S)[:, None] * SLICES + j[None, :]
    used = j[None, :] < SLICES
    wait(OVERLAP)
    r = tl.rsqrt(tl.sum(tl.load(squares + q * BM + row, mask=used, other=0.0), 1) / H + eps)
    at = (q[:, :, None] * NPAD + n[None, None, :]) * BM + row
    streams = tl.sum(tl.load(partial + at, mask=used[:, :, None], other=0.0), 1)
    value = tl.sum(streams * r[:, None], 0).to(tl.bfloat16).to(tl.float32)
    tl.store(low + row * RANK + n, value * sigmoid(value), mask=n < RANK)
    if NOUT > RANK:
        # 1 + tanh(x) = 2 sigmoid(2x); the weight's rows are halved already.
        tl.store(
            inject + row * S + n - RANK, 2.0 * sigmoid(2.0 * value), mask=(n >= RANK) & (n < NOUT)
        )
    tl.store(root + row * S + tl.arange(0, S), r)


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
    wait(OVERLAP)
    in_rows = m[None, :] < R
    x1 = tl.load(
        low + m[None, :] * RANK + k1[:, None], mask=in_rows & (k1[:, None] < RANK), other=0.0
    )
    if K2 > 0:
        x2 = tl.load(
            low + m[None, :] * RANK + k2[:, None], mask=in_rows & (k2[:, None] < RANK), other=0.0
        )
    inside = in_rows & (h[:, None] < H)
    stream = tl.load(x + m[None, :] * (S * H) + rows[:, None], mask=inside, other=0.0).to(
        tl.float32
    )
    r = tl.load(root + m[None, :] * S + (j // BH)[:, None], mask=inside, other=0.0)
    acc = mma(w1, x1, tl.zeros([S * BH, BM], tl.float32))
    if K2 > 0:
        acc = mma(w2, x2, acc)
    mixed = sigmoid(acc) * (stream * r * factor[:, None])
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
    slices = num_slices(hidden)
    num_out = weights.rank + (s if weights.has_inject else 0)
    rows = row_tile(num_rows)
    tiles = triton.cdiv(num_out, _DOWN_TILE)
    first, rest = two_parts(weights.rank)
    shared = {"BM": rows, "OVERLAP": LAUNCH.overlap}
    _down[(tiles, s * slices)](
        streams,
        weights.scale,
        weights.down,
        scratch.partial,
        scratch.squares,
        num_rows,
        W=width,
        NOUT=num_out,
        SLICE=hidden // slices,
        BN=_DOWN_TILE,
        BK=triton.next_power_of_2(hidden // slices),
        **shared,
        **LAUNCH.options(4, 1),
    )
    _join[(tiles, num_rows)](
        scratch.partial,
        scratch.squares,
        scratch.low,
        scratch.root,
        inject if inject is not None else scratch.low,
        weights.eps,
        H=hidden,
        S=s,
        RANK=weights.rank,
        NOUT=num_out,
        NPAD=tiles * _DOWN_TILE,
        SLICES=slices,
        PS=triton.next_power_of_2(slices),
        BN=_DOWN_TILE,
        **shared,
        **LAUNCH.options(1, 1),
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
        **shared,
        **LAUNCH.options(4, 1),
    )
