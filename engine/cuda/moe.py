"""Mixture of experts with 4-bit experts for a window's rows (model.md 1.6).

Each used expert is read once: a program belongs to a (row, rank) pair and leaves at once unless it is the first that
chose its expert; then it multiplies for all rows that chose it. A row's arithmetic does not depend on its company: rows
are multiplied as whole numbers (`digits`), and from them to an expert's part every rounding is written out.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# ruff: noqa: E741 - I is the width of an expert

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda.digits import (
    Digits,
    column_of_run,
    fetch,
    first_of_run,
    multiply_digits,
    place_of,
    silu_plain,
    split_groups,
    to_digits,
)
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
    unpack,
    wait,
)
from engine.cuda.products import equal_pieces, multiply_pieces, padded_outputs
from engine.cuda.quant import GROUP, QUARTER, TILE, Packed4

if TYPE_CHECKING:
    from engine.cuda.pool import FarPool
    from engine.cuda.tiers import FarExperts
    from engine.model_spec import MoeSpec

_GROUP = tl.constexpr(GROUP)
_QUARTER = tl.constexpr(QUARTER)
_ROW_TILE = 16
"""Rows that a program adds into the streams."""
_SHARED_TILE = 128


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """head bf16 [E + 1 + 2*shared, padded to 8, H]: router, shared gate, shared gate and up rows;
    shared_down bf16 [H, shared];
    gate_up 4 bits [E, 2*I, H], gate and up rows alternating; down 4 bits [E, H, I]; with `far` only the experts that
    have a slot, which are then found by address."""

    head: Tensor
    shared_down: Tensor
    gate_up: Packed4
    down: Packed4
    far: FarExperts | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them on the device, but for tables of addresses."""
        dense = self.head.numel() + self.shared_down.numel()
        return 2 * dense + self.gate_up.num_bytes + self.down.num_bytes


@dataclass(frozen=True, slots=True)
class MoeScratch:
    """Buffers for up to `max_rows` rows."""

    head: Tensor
    gates: Tensor
    weights: Tensor
    ids: Tensor
    shared: Tensor
    x: Digits
    hidden: Digits
    lists: Tensor
    parts: Tensor

    @staticmethod
    def make(spec: MoeSpec, hidden: int, max_rows: int, device: torch.device) -> MoeScratch:
        """Buffers for one geometry."""

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        return MoeScratch(
            head=torch.empty(
                equal_pieces(hidden),
                row_tile(max_rows),
                padded_outputs(spec.num_experts + 1 + 2 * spec.shared_dim),
                device=device,
            ),
            gates=empty(dtype=torch.float32),
            weights=empty(spec.num_active, dtype=torch.float32),
            ids=empty(spec.num_active, dtype=torch.int32),
            shared=empty(spec.shared_dim),
            x=Digits.make(max_rows, hidden, 1, device),
            hidden=Digits.make(max_rows * spec.num_active, spec.expert_dim, 2, device),
            lists=empty(spec.num_active, 1 + row_tile(max_rows), dtype=torch.int32),
            parts=empty(spec.num_active, hidden, dtype=torch.float32),
        )


@triton.jit
def _outputs(source, row, n, inside, ROW: tl.constexpr, PIECES: tl.constexpr, BM: tl.constexpr):
    """Outputs n of the row's product, rounded to bf16: stored, or the sum of PIECES pieces of it."""
    found = tl.load(source + row * ROW + n, mask=inside, other=0.0)
    if PIECES > 0:
        for piece in tl.static_range(1, PIECES):
            found += tl.load(source + (piece * BM + row) * ROW + n, mask=inside, other=0.0)
        found = found.to(tl.bfloat16)
    return found


@triton.jit
def _route(
    source,
    weights,
    ids,
    shared,
    gates,
    x,
    digits,
    units,
    ROW: tl.constexpr,
    PIECES: tl.constexpr,
    BM: tl.constexpr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PE: tl.constexpr,
    PT: tl.constexpr,
    BS: tl.constexpr,
    MIDDLES: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, 1 + MIDDLES + GROUPS): softmax of the TOP largest router logits, equal ones by rising id.

    The other programs: MIDDLES tiles of the shared middle, and if `source` is in pieces the shared gate's logit; digits
    of GROUPS groups of x.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    wait(OVERLAP)
    if tile == 0:
        e = tl.arange(0, PE)
        t = tl.arange(0, PT)
        stored = _outputs(source, row, e, e < E, ROW, PIECES, BM)
        # A whole number that orders as (logit, falling id) makes a choice one maximum. bf16 of either sign, as 16 bits.
        keys = _in_order(stored.to(tl.int16, bitcast=True).to(tl.int32)) * PE + (PE - 1 - e)
        keys = tl.where(e < E, keys, -(1 << 31))
        chosen = tl.zeros([PT], tl.int32)
        for rank in tl.static_range(TOP):
            largest = tl.max(keys, 0)
            chosen = tl.where(t == rank, largest, chosen)
            keys = tl.where(keys == largest, -(1 << 31), keys)
        back = chosen & (PE - 1)
        bits = _in_order((chosen - back) // PE)
        logits = tl.where(e < E, stored.to(tl.float32), -float("inf"))
        best = tl.max(logits, 0)
        total = tl.sum(tl.exp(logits - best), 0)
        top = bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
        top = tl.where(t < TOP, tl.exp(top - best) / total, 0.0)
        if NORMALIZE:
            top = top / tl.sum(top, 0)
        tl.store(weights + row * TOP + t, top.to(tl.bfloat16).to(tl.float32), mask=t < TOP)
        tl.store(ids + row * TOP + t, PE - 1 - back, mask=t < TOP)
    elif tile <= MIDDLES:
        i = (tile - 1) * BS + tl.arange(0, BS)
        inside = i < SHARED
        gate = _outputs(source, row, E + 1 + i, inside, ROW, PIECES, BM).to(tl.float32)
        up = _outputs(source, row, E + 1 + SHARED + i, inside, ROW, PIECES, BM).to(tl.float32)
        middle = (gate * sigmoid(gate)).to(tl.bfloat16).to(tl.float32) * up
        tl.store(shared + row * SHARED + i, middle, mask=inside)
        if PIECES > 0 and tile == 1:
            logit = _outputs(source, row, E + tl.arange(0, 1), True, ROW, PIECES, BM)
            tl.store(gates + row + tl.arange(0, 1), logit.to(tl.float32))
    else:
        if GROUPS > 0:
            g = tile - (1 + MIDDLES) + tl.arange(0, 1)
            split_groups(x, digits, units, row, g, H, GROUPS)


@triton.jit
def _in_order(bits):
    """16 bits of bf16, sign extended, as whole numbers that order as the values do; and back."""
    return bits ^ ((bits >> 15) & 0x7FFF)


@triton.jit
def _chosen(ids, pair, R, TOP: tl.constexpr, PT: tl.constexpr, PM: tl.constexpr):
    """The pair's expert, whether the pair is the first to choose it, how many rows chose it, and of each row [PM]
    its place among them (PM if it did not) and the rank it gave the expert."""
    m = tl.arange(0, PM)
    t = tl.arange(0, PT)
    expert = tl.load(ids + pair)
    at = m[:, None] * TOP + t[None, :]
    all_ids = tl.load(ids + at, mask=(m[:, None] < R) & (t[None, :] < TOP), other=-1)
    match = all_ids == expert
    first = tl.min(tl.min(tl.where(match, at, PM * TOP), 1), 0)
    rank = tl.sum(tl.where(match, t[None, :], 0), 1)
    chose = tl.sum(match.to(tl.int32), 1)
    place = tl.where(chose > 0, tl.cumsum(chose, 0) - 1, PM)
    return expert, first == pair, tl.sum(chose, 0), place, rank


@triton.jit
def _tile_of_rows(base, count, place, rank, TOP: tl.constexpr, PM: tl.constexpr, BM: tl.constexpr):
    """Of the BM rows from the base-th that chose the expert: row, (row, rank) pair and whether there is one."""
    c = base + tl.arange(0, BM)
    m = tl.arange(0, PM)
    mine = place[None, :] == c[:, None]
    row = tl.sum(tl.where(mine, m[None, :], 0), 1)
    pair = tl.sum(tl.where(mine, (m * TOP + rank)[None, :], 0), 1)
    return row, pair, c < count


@triton.jit
def expert_at(
    words,
    scales,
    addresses,
    expert,
    LINES: tl.constexpr,
    QUARTER: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
):
    """Where an expert's words and scales begin: `expert` times its LINES behind the first's, or where a table says."""
    if BY_ADDRESS:
        own = addresses + expert * 2
        # Known to be aligned: without that, each value would be loaded by itself.
        words = tl.multiple_of(tl.load(own).to(words.dtype), 16)
        scales = tl.multiple_of(tl.load(own + 1).to(scales.dtype), 16)
    else:
        first = expert.to(tl.int64) * LINES
        words = words + first * QUARTER
        scales = scales + first
    return words, scales


@triton.jit
def _quarter(x_rows, k, rows, K: tl.constexpr, GROUP: tl.constexpr):
    """Columns k of the tile's rows."""
    if K % GROUP == 0:
        return tl.load(x_rows + k, mask=rows[None, :], other=0.0)
    return tl.load(x_rows + k, mask=rows[None, :] & (k < K), other=0.0)


@triton.jit
def multiply4(
    words,
    scales,
    n,
    x_rows,
    rows,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """acc [BN, BM] of output rows n of one expert; x_rows point at BM rows ([1, BM]), zeros where not `rows`."""
    q = tl.arange(0, QUARTER)
    if TILES * TILE % BN != 0:
        # The last program reaches beyond the padded rows.
        n = tl.minimum(n, TILES * TILE - 1)
    line = (n // TILE) * (GROUPS * TILE) + n % TILE
    own = words + line[:, None] * QUARTER + q[None, :]
    own_scales = scales + line[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    scale = tl.load(own_scales)
    for g in range(0, GROUPS):
        packed = tl.load(own + g * (TILE * QUARTER))
        # One group ahead, as only loads that feed a product are put ahead by the compiler.
        next_scale = tl.load(own_scales + tl.minimum(g + 1, GROUPS - 1) * TILE)
        a, b, c, d = unpack(packed)
        k = g * GROUP + q[:, None]
        part = mma(a, _quarter(x_rows, k, rows, K, GROUP), tl.zeros([BN, BM], tl.float32))
        part = mma(b, _quarter(x_rows, k + QUARTER, rows, K, GROUP), part)
        part = mma(c, _quarter(x_rows, k + 2 * QUARTER, rows, K, GROUP), part)
        part = mma(d, _quarter(x_rows, k + 3 * QUARTER, rows, K, GROUP), part)
        acc += part * scale.to(tl.float32)
        scale = next_scale
    return acc


@triton.jit(do_not_specialize=["R"])
def _gate_up(
    digits,
    units,
    words,
    scales,
    addresses,
    order,
    ids,
    hidden,
    hidden_units,
    lists,
    R,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    I: tl.constexpr,
    OUT: tl.constexpr,
    TOP: tl.constexpr,
    PT: tl.constexpr,
    PM: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    ONE: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
    SKIP_FAR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (runs of hidden columns, pairs): digits of hidden [R * TOP, OUT groups] = silu(gate) * up.

    A run is half a group: the columns whose digits lie together. BN is its rows of gate and up.
    SKIP_FAR: leave out the experts that have a place in `order`, those in host memory.
    lists int32 [pairs, 1 + PM]: how many rows a pair multiplies, 0 unless it is its expert's first; and their pairs.
    """
    run = tl.program_id(0)
    pair = tl.program_id(1)
    wait(OVERLAP)
    if ONE:
        expert, is_first, count = tl.load(ids + pair), pair >= 0, 1
        place = tl.where(tl.arange(0, PM) == 0, 0, PM)
        rank = tl.arange(0, PM) * 0 + pair
    else:
        expert, is_first, count, place, rank = _chosen(ids, pair, R, TOP, PT, PM)
    if SKIP_FAR:
        is_first = is_first & (tl.load(order + expert) < 0)
    if run == 0:
        own = lists + pair * (1 + PM)
        m = tl.arange(0, PM)
        tl.store(own, tl.where(is_first, count, 0))
        tl.store(own + 1 + place, m * TOP + rank, mask=is_first & (place < PM))
    if is_first:
        own_words, own_scales = expert_at(
            words, scales, addresses, expert, TILES * GROUPS * TILE, _QUARTER, BY_ADDRESS
        )
        i = column_of_run(run, tl.arange(0, BN // 2))
        r = tl.arange(0, BN)
        if not BY_ADDRESS:
            for half in tl.static_range(2):
                # Half of the run's columns are half a group away.
                tile = (first_of_run(run) + half * (_GROUP // 2)) * 2 // TILE
                line = tl.minimum(tile, TILES - 1) * (GROUPS * TILE)
                fetch(own_scales + line, GROUPS * TILE * 2)
        for base in range(0, count, BM):
            if ONE:
                rows = tl.arange(0, BM) == 0
                row = tl.arange(0, BM) * 0
                at = row + pair
            else:
                row, at, rows = _tile_of_rows(base, count, place, rank, TOP, PM, BM)
            acc = multiply_digits(
                own_words,
                own_scales,
                2 * column_of_run(run, r // 2) + r % 2,
                digits,
                units,
                row,
                rows,
                GROUPS,
                1,
                BN,
                BM,
                TILE,
                TILES,
                OUT * 2 * _GROUP > TILES * TILE,
            )
            gate, up = tl.split(tl.permute(acc.reshape(BN // 2, 2, BM), (0, 2, 1)))
            middle = tl.where(i[:, None] < I, silu_plain(gate) * up, 0.0)
            high, low, unit = to_digits(middle, 0)
            to = hidden + at[None, :] * (2 * OUT * _GROUP) + place_of(i)[:, None]
            tl.store(to, high, mask=rows[None, :])
            tl.store(to + OUT * _GROUP, low, mask=rows[None, :])
            tl.store(hidden_units + at * (2 * OUT) + run, unit, mask=rows)


@triton.jit
def _down(
    hidden,
    hidden_units,
    words,
    scales,
    addresses,
    ids,
    lists,
    parts,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PM: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    ONE: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
    SKIP_FAR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of output columns, pairs): parts fp32 [R, TOP, H]."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    pair = tl.program_id(1)
    if not BY_ADDRESS:
        # Experts were chosen before the kernel that this one overlaps. What is read here only says which memory to ask
        # for: it is read again below.
        likely = early(ids + pair, True, 0).to(tl.int64) * (TILES * GROUPS * TILE)
        for t in tl.static_range((BN + TILE - 1) // TILE):
            tile = tl.minimum(tl.program_id(0) * BN // TILE + t, TILES - 1)
            fetch(scales + likely + tile * (GROUPS * TILE), GROUPS * TILE * 2)
    wait(OVERLAP)
    own = lists + pair * (1 + PM)
    if ONE and not SKIP_FAR:
        count = 1
    else:
        count = tl.load(own)
    if count > 0:
        own_words, own_scales = expert_at(
            words,
            scales,
            addresses,
            tl.load(ids + pair),
            TILES * GROUPS * TILE,
            _QUARTER,
            BY_ADDRESS,
        )
        for base in range(0, count, BM):
            c = base + tl.arange(0, BM)
            rows = c < count
            if ONE:
                at = c * 0 + pair
            else:
                at = tl.load(own + 1 + c, mask=rows, other=0)
            acc = multiply_digits(
                own_words,
                own_scales,
                n,
                hidden,
                hidden_units,
                at,
                rows,
                GROUPS,
                2,
                BN,
                BM,
                TILE,
                TILES,
                TILES * TILE % BN != 0,
            )
            tl.store(
                parts + at[None, :] * H + n[:, None], acc, mask=rows[None, :] & (n[:, None] < H)
            )


@triton.jit(do_not_specialize=["R"])
def _combine(
    shared,
    w,
    gates,
    weights,
    parts,
    streams,
    inject,
    R,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    TOP: tl.constexpr,
    S: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of columns, tiles of rows): streams += inject (x) (shared expert, gated, + sum of weighted parts).

    All but the parts was written by `_route` or before it, so before `_gate_up`, which has finished when this starts:
    that is read and multiplied while `_down` runs.
    """
    start(OVERLAP)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k1 = tl.arange(0, K1)
    in_n = n[:, None] < H
    in_rows = m[None, :] < R
    inside = in_rows & in_n
    w1 = tl.load(
        w + n[:, None] * SHARED + k1[None, :], mask=in_n & (k1[None, :] < SHARED), other=0.0
    )
    x1 = early(shared + m[None, :] * SHARED + k1[:, None], in_rows & (k1[:, None] < SHARED), 0.0)
    if K2 > 0:
        k2 = K1 + tl.arange(0, K2)
        w2 = tl.load(
            w + n[:, None] * SHARED + k2[None, :], mask=in_n & (k2[None, :] < SHARED), other=0.0
        )
        x2 = early(
            shared + m[None, :] * SHARED + k2[:, None], in_rows & (k2[:, None] < SHARED), 0.0
        )
    s = tl.arange(0, S)
    at = streams + m[None, None, :] * (S * H) + s[:, None, None] * H + n[None, :, None]
    old = early(at, inside[None, :, :], 0.0)
    factor = early(inject + m[None, :] * S + s[:, None], in_rows, 0.0)
    gate = early(gates + m, m < R, 0.0)
    acc = mma(held(w1), held(x1), tl.zeros([BN, BM], tl.float32))
    if K2 > 0:
        acc = mma(held(w2), held(x2), acc)
    y = acc.to(tl.bfloat16).to(tl.float32) * sigmoid(gate)[None, :]
    wait(OVERLAP)
    routed = tl.zeros([BN, BM], tl.float32)
    for rank in tl.static_range(TOP):
        pair = m * TOP + rank
        part = tl.load(parts + pair[None, :] * H + n[:, None], mask=inside, other=0.0)
        routed += tl.load(weights + pair, mask=m < R, other=0.0)[None, :] * part
    y += routed
    y = y.to(tl.bfloat16).to(tl.float32)
    added = factor.to(tl.float32)[:, None, :] * y[None, :, :]
    tl.store(at, old.to(tl.float32) + added, mask=inside[None, :, :])


def moe_into_streams(
    x: Tensor,
    weights: MoeWeights,
    scratch: MoeScratch,
    streams: Tensor,
    inject: Tensor,
    spec: MoeSpec,
    pool: FarPool | None = None,
    *,
    rests: bool = True,
) -> None:
    """streams bf16 [R, S*H] += outer(inject [R, S], MoE(x bf16 [R, H])), in place; R is at most one row tile.

    pool: computes the far experts, if there are any, while kernels compute the others; rests: see FarPool.begin.
    """
    num_rows, hidden = x.shape
    route(x, weights, scratch, spec)
    multiply_window(x, weights, scratch, spec, pool, rests=rests)
    first, rest = two_parts(spec.shared_dim)
    _combine[(triton.cdiv(hidden, 16), triton.cdiv(num_rows, _ROW_TILE))](
        scratch.shared,
        weights.shared_down,
        scratch.gates,
        scratch.weights,
        scratch.parts,
        streams,
        inject,
        num_rows,
        H=hidden,
        SHARED=spec.shared_dim,
        TOP=spec.num_active,
        S=inject.shape[1],
        BN=16,
        BM=_ROW_TILE,
        K1=first,
        K2=rest,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How the experts' products are cut. Measured at the real geometry with one row and with twenty."""

    rows: int = 4
    """Rows of one expert multiplied at once: their two digits fill the narrowest product."""
    far_rows: int = 16
    """The same, at most, where experts lie in host memory: more rows than that read those over the bus again."""
    up_warps: int = 4
    up_stages: int = 3
    up_registers: int = 128
    down_rows: int = 64
    """Output rows of one program."""
    down_warps: int = 2
    down_stages: int = 3
    down_registers: int = 96


def multiply_window(
    x: Tensor,
    weights: MoeWeights,
    scratch: MoeScratch,
    spec: MoeSpec,
    pool: FarPool | None,
    *,
    rests: bool,
) -> None:
    """scratch.parts of the rows x, whose digits are scratch.x, from scratch.ids; pool, rests: see moe_into_streams."""
    far = weights.far
    if pool is None or far is None or not far.count:
        multiply_split(x.shape[0], weights, scratch, spec, ExpertTiling())
        return
    pool.begin(x, scratch.ids, far, rests=rests)
    multiply_split(x.shape[0], weights, scratch, spec, ExpertTiling(), skip_far=True)
    pool.finish(x.shape[0], scratch.ids, scratch.parts, far)


def multiply_split(
    num_rows: int,
    weights: MoeWeights,
    scratch: MoeScratch,
    spec: MoeSpec,
    cut: ExpertTiling,
    *,
    skip_far: bool = False,
) -> None:
    """scratch.parts of the rows scratch.x from scratch.ids; skip_far: but for experts in host memory."""
    pairs = num_rows * spec.num_active
    hidden = scratch.parts.shape[-1]
    up, down, far = weights.gate_up, weights.down, weights.far
    rows, up_cap, down_cap = (
        cut.rows,
        {"maxnreg": cut.up_registers},
        {"maxnreg": cut.down_registers},
    )
    if far is not None and far.count and not skip_far:
        rows = min(cut.far_rows, max(cut.rows, triton.next_power_of_2(num_rows)))
        up_cap = down_cap = {}
    shared = {
        "PM": row_tile(num_rows),
        "BM": rows,
        "ONE": num_rows == 1,
        "TILE": TILE,
        "BY_ADDRESS": far is not None,
        "SKIP_FAR": skip_far,
        "OVERLAP": LAUNCH.overlap,
        # What is rounded is written out.
        "enable_fp_fusion": False,
    }
    _gate_up[(2 * down.num_groups, pairs)](
        scratch.x.digits,
        scratch.x.units,
        up.words,
        up.scales,
        up.words if far is None else far.up_at,
        scratch.ids if far is None else far.order,
        scratch.ids,
        scratch.hidden.digits,
        scratch.hidden.units,
        scratch.lists,
        num_rows,
        I=spec.expert_dim,
        OUT=down.num_groups,
        TOP=spec.num_active,
        PT=triton.next_power_of_2(spec.num_active),
        GROUPS=up.num_groups,
        TILES=up.words.shape[1],
        BN=GROUP,
        **shared,
        **up_cap,
        **LAUNCH.options(cut.up_warps, cut.up_stages),
    )
    _down[(triton.cdiv(hidden, cut.down_rows), pairs)](
        scratch.hidden.digits,
        scratch.hidden.units,
        down.words,
        down.scales,
        down.words if far is None else far.down_at,
        scratch.ids,
        scratch.lists,
        scratch.parts,
        H=hidden,
        GROUPS=down.num_groups,
        TILES=down.words.shape[1],
        BN=cut.down_rows,
        **shared,
        **down_cap,
        **LAUNCH.options(cut.down_warps, cut.down_stages),
    )


def route(x: Tensor, weights: MoeWeights, scratch: MoeScratch, spec: MoeSpec) -> None:
    """x bf16 [R, H] -> scratch.weights, ids, shared, gates and x; R is at most one row tile."""
    pieces, _, width = scratch.head.shape
    num_rows = x.shape[0]
    multiply_pieces(x, weights.head, pieces, scratch.head)
    head = _Head(scratch.head, num_rows, width, pieces, row_tile(num_rows))
    out = (scratch.weights, scratch.ids, scratch.shared, scratch.gates)
    _choose(head, *out, spec, x, scratch.x)


def route_into(head: Tensor, weights: Tensor, ids: Tensor, shared: Tensor, spec: MoeSpec) -> None:
    """head bf16 [R, rows of MoeWeights.head] -> weights fp32 and ids int32 [R, k], shared bf16 [R, shared]."""
    num_rows, width = head.shape
    _choose(_Head(head, num_rows, width, 0, 0), weights, ids, shared, weights, spec)


@dataclass(frozen=True, slots=True)
class _Head:
    """What rows give with MoeWeights.head: bf16 [R, width], or pieces fp32 [pieces, row tile, width] to be added."""

    source: Tensor
    num_rows: int
    width: int
    pieces: int
    row_tile: int


def _choose(
    head: _Head,
    weights: Tensor,
    ids: Tensor,
    shared: Tensor,
    gates: Tensor,
    spec: MoeSpec,
    x: Tensor | None = None,
    split: Digits | None = None,
) -> None:
    """x, split: rows bf16 [R, H] and where their digits go, if they are wanted."""
    middles = triton.cdiv(spec.shared_dim, _SHARED_TILE)
    groups = 0 if split is None else split.units.shape[1]
    _route[(head.num_rows, 1 + middles + groups)](
        head.source,
        weights,
        ids,
        shared,
        gates,
        head.source if x is None else x,
        ids if split is None else split.digits,
        weights if split is None else split.units,
        ROW=head.width,
        PIECES=head.pieces,
        BM=head.row_tile,
        E=spec.num_experts,
        TOP=spec.num_active,
        SHARED=spec.shared_dim,
        NORMALIZE=spec.normalize,
        PE=triton.next_power_of_2(spec.num_experts),
        PT=triton.next_power_of_2(spec.num_active),
        BS=_SHARED_TILE,
        MIDDLES=middles,
        H=0 if x is None else x.shape[1],
        GROUPS=groups,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(1, 1),
    )
