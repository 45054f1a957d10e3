"""Gated residual for a window's rows (model.md 1.3): two kernels from the streams to the mixed row.

The first multiplies the un-normed streams and leaves the norm's scale to the end, where it is one number per row and
stream: so that the columns can be cut into slices that many programs read at once. The last program to finish an
output tile adds the slices up, always in the same order.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.primitives import LAUNCH, Ahead, begin, mma, pull, row_tile, sigmoid, wait

_DOWN_TILE = 32
_UP_TILE = 16
_MIN_SLICE = 512


@dataclass(frozen=True, slots=True)
class ResidualWeights:
    """scale fp32 [S*H] = (1 + w) / S; down bf16 [rank + S or rank, S*H], injection rows halved; up bf16 [S*H, rank]."""

    scale: Tensor
    down: Tensor
    up: Tensor
    rank: int
    num_streams: int
    eps: float

    @property
    def num_bytes(self) -> int:
        """Bytes of the three."""
        return sum(t.numel() * t.element_size() for t in (self.scale, self.down, self.up))


@dataclass(frozen=True, slots=True)
class ResidualScratch:
    """Buffers of one reading, for up to `max_rows` rows; contents do not matter before, counters are zero."""

    partial: Tensor
    squares: Tensor
    counters: Tensor
    low: Tensor
    root: Tensor

    @staticmethod
    def make(hidden: int, num_streams: int, rank: int, max_rows: int, device: torch.device) -> ResidualScratch:
        """Buffers for one geometry."""
        rows = row_tile(max_rows)
        slices = num_streams * num_slices(hidden)
        tiles = triton.cdiv(rank + num_streams, _DOWN_TILE)
        return ResidualScratch(
            partial=torch.empty(slices, tiles * _DOWN_TILE, rows, device=device),
            squares=torch.empty(slices, rows, device=device),
            counters=torch.zeros(tiles, dtype=torch.int32, device=device),
            low=torch.empty(max_rows, rank, dtype=torch.bfloat16, device=device),
            root=torch.empty(max_rows, num_streams, device=device),
        )


def num_slices(hidden: int) -> int:
    """Slices of one stream: a power of two of equal ones, none too short to be worth a program."""
    return next((n for n in (8, 4, 2) if hidden % n == 0 and hidden // n >= _MIN_SLICE), 1)


@triton.jit(do_not_specialize=["R", "ahead_lines"])
def _down(
    x, scale, w, partial, squares, counters, low, root, inject,
    ahead, ahead_lines,
    R, eps,
    H: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, NOUT: tl.constexpr,
    SLICE: tl.constexpr, SLICES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (output tiles, slices of all streams)."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    base = part * SLICE
    begin(OVERLAP)
    wait(OVERLAP)
    acc = tl.zeros([BN, BM], tl.float32)
    total = tl.zeros([BM], tl.float32)
    for first in range(0, SLICE, BK):
        c = first + k
        inside = c < SLICE
        wt = tl.load(w + n[:, None] * (S * H) + base + c[None, :], mask=(n[:, None] < NOUT) & inside[None, :], other=0.0)
        xt = tl.load(x + m[None, :] * (S * H) + base + c[:, None], mask=(m[None, :] < R) & inside[:, None], other=0.0)
        wide = xt.to(tl.float32)
        total += tl.sum(wide * wide, 0)
        factor = tl.load(scale + base + c, mask=inside, other=0.0)
        acc = mma(wt, (wide * factor[:, None]).to(tl.bfloat16), acc)
    pull(ahead, ahead_lines, 128)
    NPAD: tl.constexpr = (NOUT + BN - 1) // BN * BN
    own = partial + (part * NPAD + n[:, None]) * BM + m[None, :]
    tl.store(own, acc)
    # Every tile's programs write the same sums, so each may read them.
    tl.store(squares + part * BM + m, total)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
    if arrived == S * SLICES - 1:
        tl.debug_barrier()
        q = tl.arange(0, S * SLICES)
        # All slices at once: one round trip to memory, not one per slice.
        sums = tl.load(squares + q[:, None] * BM + m[None, :], cache_modifier=".cg")
        parts = tl.load(
            partial + (q[:, None, None] * NPAD + n[None, :, None]) * BM + m[None, None, :], cache_modifier=".cg"
        )
        r = tl.rsqrt(tl.sum(sums.reshape(S, SLICES, BM), 1) / H + eps)
        streams = tl.sum(parts.reshape(S, SLICES, BN, BM), 1)
        total_acc = tl.sum(streams * r[:, None, :], 0)
        if tile == 0:
            at_root = root + m[None, :] * S + tl.arange(0, S)[:, None]
            tl.store(at_root, r, mask=m[None, :] < R)
        value = total_acc.to(tl.bfloat16).to(tl.float32)
        mixed = value * sigmoid(value)
        tl.store(low + m[None, :] * RANK + n[:, None], mixed, mask=(m[None, :] < R) & (n[:, None] < RANK))
        if NOUT > RANK:
            gate = 2.0 * sigmoid(2.0 * value)
            tl.store(inject + m[None, :] * S + (n[:, None] - RANK), gate,
                     mask=(m[None, :] < R) & (n[:, None] >= RANK) & (n[:, None] < NOUT))
        tl.store(counters + tile, 0)


@triton.jit(do_not_specialize=["R", "ahead_lines"])
def _up(
    x, scale, w, low, root, out, ahead, ahead_lines,
    R,
    H: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BH: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Grid (tiles of columns): out [R, H] = sum over streams of sigmoid(low w^T) times the normed stream."""
    j = tl.arange(0, S * BH)
    h = tl.program_id(0) * BH + j % BH
    rows = j // BH * H + tl.minimum(h, H - 1)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    begin(OVERLAP)
    wait(OVERLAP)
    inside = (m[None, :] < R) & (h[:, None] < H)
    stream = tl.load(x + m[None, :] * (S * H) + rows[:, None], mask=inside, other=0.0).to(tl.float32)
    r = tl.load(root + m[None, :] * S + (j // BH)[:, None], mask=inside, other=0.0)
    factor = tl.load(scale + rows)
    acc = tl.zeros([S * BH, BM], tl.float32)
    for first in range(0, RANK, BK):
        c = first + k
        wt = tl.load(w + rows[:, None] * RANK + c[None, :], mask=c[None, :] < RANK, other=0.0)
        xt = tl.load(low + m[None, :] * RANK + c[:, None], mask=(m[None, :] < R) & (c[:, None] < RANK), other=0.0)
        acc = mma(wt, xt, acc)
    pull(ahead, ahead_lines, 128)
    mixed = sigmoid(acc) * (stream * r * factor[:, None])
    total = tl.sum(mixed.reshape(S, BH, BM), 0)
    own = tl.program_id(0) * BH + tl.arange(0, BH)
    tl.store(out + m[None, :] * H + own[:, None], total, mask=(m[None, :] < R) & (own[:, None] < H))


def read_streams(
    streams: Tensor, weights: ResidualWeights, scratch: ResidualScratch, out: Tensor, inject: Tensor | None,
    ahead: Tensor | None = None,
) -> None:
    """streams bf16 [R, S*H] -> out bf16 [R, H] and, unless None, injection weights inject bf16 [R, S]."""
    num_rows, width = streams.shape
    s = weights.num_streams
    hidden = width // s
    slices = num_slices(hidden)
    piece = hidden // slices
    num_out = weights.down.shape[0]
    rows = row_tile(num_rows)
    up, then = Ahead.of(weights.up, weights.up), Ahead.of(ahead, weights.up)
    _down[(triton.cdiv(num_out, _DOWN_TILE), s * slices)](
        streams, weights.scale, weights.down, scratch.partial, scratch.squares, scratch.counters,
        scratch.low, scratch.root, inject if inject is not None else scratch.low,
        up.start, up.num_lines,
        num_rows, weights.eps,
        H=hidden, S=s, RANK=weights.rank, NOUT=num_out, SLICE=piece, SLICES=slices,
        BN=_DOWN_TILE, BM=rows, BK=128, OVERLAP=LAUNCH.overlap, **LAUNCH.options(4, 5),
    )
    _up[(triton.cdiv(hidden, _UP_TILE),)](
        streams, weights.scale, weights.up, scratch.low, scratch.root, out, then.start, then.num_lines,
        num_rows,
        H=hidden, S=s, RANK=weights.rank,
        BH=_UP_TILE, BM=rows, BK=64, OVERLAP=LAUNCH.overlap, **LAUNCH.options(4, 5),
    )
