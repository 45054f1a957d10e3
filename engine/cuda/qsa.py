"""Sparse attention for a window's rows (model.md 1.5): cells written, blocks selected, keys read, all by position.

Whatever a row may see is cut into SPLITS parts by its own length only, and the parts are joined in order: so a row's
arithmetic does not depend on its company.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import LAUNCH, early, mma, quantized, sigmoid, start, wait
from engine.state import RING_ROWS

if TYPE_CHECKING:
    from engine.model_spec import QsaSpec
    from engine.state import SlotState

SPLITS = 16
"""Programs that share one row's keys."""
_KEY_TILE = 64
_SCORE_PROGRAMS = 32
_SCORE_TILE = 128
_SELECT_TILE = 2048


@dataclass(frozen=True, slots=True)
class QsaWeights:
    """in_proj bf16 [2*A*D + 2*N*D + (index heads + 1)*I, H]; out_proj bf16 [H, A*D]; norms fp32 (1 + w)."""

    index: int
    """Counter among the layers that hold K/V."""
    in_proj: Tensor
    out_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    index_q_norm: Tensor
    index_k_norm: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        norms = (self.q_norm, self.k_norm, self.index_q_norm, self.index_k_norm)
        return sum(t.numel() * t.element_size() for t in (self.in_proj, self.out_proj, *norms))


@dataclass(frozen=True, slots=True)
class QsaScratch:
    """Buffers for up to `max_rows` rows."""

    q: Tensor
    index_q: Tensor
    scores: Tensor
    blocks: Tensor
    parts: Tensor
    sums: Tensor

    @staticmethod
    def make(spec: QsaSpec, capacity: int, max_rows: int, device: torch.device) -> QsaScratch:
        """Buffers for one geometry. scores: one per block a slot can hold, only where selection can happen."""
        heads, dim = spec.num_heads, spec.head_dim
        num_blocks = capacity // spec.block_tokens if capacity > spec.dense_tokens else 1

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        return QsaScratch(
            q=empty(heads, dim, dtype=torch.bfloat16),
            index_q=empty(spec.num_index_heads, spec.index_dim, dtype=torch.bfloat16),
            scores=empty(num_blocks, dtype=torch.float32),
            blocks=empty(spec.budget_blocks, dtype=torch.int32),
            parts=empty(SPLITS, heads, dim, dtype=torch.float32),
            sums=empty(SPLITS, heads, 2, dtype=torch.float32),
        )


@triton.jit
def _turned(raw, partner, weight, partner_weight, cos, sin, i, root, ROT: tl.constexpr):
    """Norm and rotation of one head: `partner` holds each element's other half, whose sign is in `sin`."""
    own = (raw * root * weight).to(tl.bfloat16).to(tl.float32)
    other = (partner * root * partner_weight).to(tl.bfloat16).to(tl.float32)
    return tl.where(i < ROT, own * cos + other * sin, own)


@triton.jit
def _norm_and_turn(
    source, norm, cos_row, sin_row, eps, D: tl.constexpr, ROT: tl.constexpr, P: tl.constexpr
):
    """A head [D] at `source`, normed and rotated: fp32 [P]."""
    i = tl.arange(0, P)
    inside = i < D
    j = tl.where(i < ROT // 2, i + ROT // 2, i - ROT // 2)
    turning = i < ROT
    raw = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + j, mask=turning, other=0.0).to(tl.float32)
    weight = tl.load(norm + i, mask=inside, other=0.0)
    partner_weight = tl.load(norm + j, mask=turning, other=0.0)
    cos = tl.load(cos_row + i, mask=turning, other=0.0).to(tl.float32)
    sin = tl.load(sin_row + i, mask=turning, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(raw * raw, 0) / D + eps)
    return _turned(raw, partner, weight, partner_weight, cos, sin, i, root, ROT)


@triton.jit
def _store_cell(cache, scales, cell, x, i, D: tl.constexpr, KV8: tl.constexpr):
    """x bf16 [P] as a cell, 0 beyond D."""
    if KV8:
        codes, scale = quantized(tl.where(i < D, x, 0.0).to(tl.float32))
        tl.store(cache + cell * D + i, codes, mask=i < D)
        tl.store(scales + cell, scale)
    else:
        tl.store(cache + cell * D + i, x, mask=i < D)


@triton.jit
def load_cells(cache, scales, cells, d, inside, D: tl.constexpr, KV8: tl.constexpr):
    """Cells [BC] as bf16 [BC, P], zeros where not `inside`."""
    valid = inside[:, None] & (d[None, :] < D)
    found = tl.load(cache + (cells * D)[:, None] + d[None, :], mask=valid, other=0)
    if KV8:
        scale = tl.load(scales + cells, mask=inside, other=0.0)
        found = (found.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    return found


@triton.jit(do_not_specialize=["ring_from"])
def _write_cells(
    projected,
    q_norm,
    k_norm,
    iq_norm,
    ik_norm,
    cos,
    sin,
    q_out,
    iq_out,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    ring,
    old_ring,
    blocks,
    row_slots,
    positions,
    starts,
    eps,
    capacity,
    num_blocks,
    ring_from,
    A: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    IH: tl.constexpr,
    ID: tl.constexpr,
    BLOCK: tl.constexpr,
    ROT: tl.constexpr,
    RING: tl.constexpr,
    PD: tl.constexpr,
    PI: tl.constexpr,
    KV8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, A + 2*N + IH + 1): one head each. Writes q, index q, K, V, the raw index key and a finished block."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    ROW: tl.constexpr = 2 * A * D + 2 * N * D + (IH + 1) * ID
    KEYS: tl.constexpr = 2 * A * D
    INDEX: tl.constexpr = KEYS + 2 * N * D
    position = early(positions + row, True, 0)
    slot = early(row_slots + row, True, 0).to(tl.int64)
    wait(OVERLAP)
    source = projected + row * ROW
    i = tl.arange(0, PD)
    x = tl.arange(0, PI)
    cos_row = cos + position.to(tl.int64) * ROT
    sin_row = sin + position.to(tl.int64) * ROT
    if head < A:
        turned = _norm_and_turn(source + head * 2 * D, q_norm, cos_row, sin_row, eps, D, ROT, PD)
        tl.store(q_out + (row * A + head) * D + i, turned, mask=i < D)
    elif head < A + N:
        h = head - A
        turned = _norm_and_turn(source + KEYS + h * D, k_norm, cos_row, sin_row, eps, D, ROT, PD)
        cell = (slot * N + h) * capacity + position
        _store_cell(k_cache, k_scales, cell, turned.to(tl.bfloat16), i, D, KV8)
    elif head < A + 2 * N:
        h = head - A - N
        value = tl.load(source + KEYS + N * D + h * D + i, mask=i < D, other=0.0)
        cell = (slot * N + h) * capacity + position
        _store_cell(v_cache, v_scales, cell, value, i, D, KV8)
    elif head < A + 2 * N + IH:
        h = head - A - 2 * N
        turned = _norm_and_turn(
            source + INDEX + h * ID, iq_norm, cos_row, sin_row, eps, ID, ROT, PI
        )
        tl.store(iq_out + (row * IH + h) * ID + x, turned, mask=x < ID)
    else:
        raw = tl.load(source + INDEX + IH * ID + x, mask=x < ID, other=0.0)
        tl.store(
            ring + (slot * RING + position % RING) * ID + x, raw, mask=(x < ID) & (row >= ring_from)
        )
        if (position + 1) % BLOCK == 0:
            begin = tl.load(starts + row)
            first = position - (BLOCK - 1)
            _pool(
                projected,
                old_ring + slot * RING * ID,
                ik_norm,
                cos + first.to(tl.int64) * ROT,
                sin + first.to(tl.int64) * ROT,
                blocks + (slot * num_blocks + first // BLOCK) * ID,
                row,
                begin,
                position,
                eps,
                ROW,
                INDEX + IH * ID,
                ID,
                BLOCK,
                ROT,
                RING,
                PI,
            )


@triton.jit
def _pool(
    projected,
    ring,
    norm,
    cos_row,
    sin_row,
    out,
    row,
    start,
    position,
    eps,
    ROW: tl.constexpr,
    OFFSET: tl.constexpr,
    ID: tl.constexpr,
    BLOCK: tl.constexpr,
    ROT: tl.constexpr,
    RING: tl.constexpr,
    PI: tl.constexpr,
):
    """The index key of the block that ends at `position`: rows of this window from `projected`, older from the ring."""
    i = tl.arange(0, PI)
    j = tl.where(i < ROT // 2, i + ROT // 2, i - ROT // 2)
    total = tl.zeros([PI], tl.float32)
    partner = tl.zeros([PI], tl.float32)
    for back in tl.static_range(BLOCK - 1, -1, -1):
        here = row - back >= start
        new = projected + (row - back) * ROW + OFFSET
        old = ring + ((position - back) % RING) * ID
        total += tl.load(new + i, mask=here & (i < ID), other=0.0).to(tl.float32)
        total += tl.load(old + i, mask=(row - back < start) & (i < ID), other=0.0).to(tl.float32)
        partner += tl.load(new + j, mask=here & (i < ROT), other=0.0).to(tl.float32)
        partner += tl.load(old + j, mask=(row - back < start) & (i < ROT), other=0.0).to(tl.float32)
    raw = (total * (1.0 / BLOCK)).to(tl.bfloat16).to(tl.float32)
    partner = (partner * (1.0 / BLOCK)).to(tl.bfloat16).to(tl.float32)
    weight = tl.load(norm + i, mask=i < ID, other=0.0)
    partner_weight = tl.load(norm + j, mask=i < ROT, other=0.0)
    cos = tl.load(cos_row + i, mask=i < ROT, other=0.0).to(tl.float32)
    sin = tl.load(sin_row + i, mask=i < ROT, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(raw * raw, 0) / ID + eps)
    tl.store(
        out + i, _turned(raw, partner, weight, partner_weight, cos, sin, i, root, ROT), mask=i < ID
    )


@triton.jit
def _score(
    index_q,
    blocks,
    scores,
    row_slots,
    positions,
    num_blocks,
    IH: tl.constexpr,
    ID: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BB: tl.constexpr,
    PI: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, PROGRAMS): scores fp32 [R, blocks] of complete blocks, for rows that see more than DENSE tokens."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    visible = early(positions + row, True, 0) + 1
    slot = early(row_slots + row, True, 0).to(tl.int64)
    wait(OVERLAP)
    if visible > DENSE:
        complete = visible // BLOCK
        i = tl.arange(0, PI)
        keys = blocks + slot * num_blocks * ID
        for tile in range(part, tl.cdiv(complete, BB), PROGRAMS):
            b = tile * BB + tl.arange(0, BB)
            inside = (b[:, None] < complete) & (i[None, :] < ID)
            key = tl.load(keys + b[:, None] * ID + i[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            total = tl.zeros([BB], tl.float32)
            for h in tl.static_range(IH):
                q = tl.load(index_q + (row * IH + h) * ID + i, mask=i < ID, other=0.0).to(
                    tl.float32
                )
                total += tl.maximum(tl.sum(key * q[None, :], 1), 0.0)
            tl.store(scores + row.to(tl.int64) * num_blocks + b, total, mask=b < complete)


@triton.jit(do_not_specialize=["num_blocks"])
def _select(
    scores,
    chosen,
    positions,
    num_blocks,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    BUDGET: tl.constexpr,
    BB: tl.constexpr,
    MASK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows): the BUDGET blocks of largest score, ascending; among equal ones at the cut the earliest.

    chosen: int32 [R, BUDGET], or with MASK int32 [R, ceil(blocks / 16)]: 16 marks each, of complete blocks chosen.

    Scores are never negative, so their bits order as they do; the cut is found digit by digit.
    """
    row = tl.program_id(0)
    visible = early(positions + row, True, 0) + 1
    wait(OVERLAP)
    if visible > DENSE:
        complete = visible // BLOCK
        own = scores + row.to(tl.int64) * num_blocks
        digit = tl.arange(0, 256)
        wanted = BUDGET
        prefix = 0
        for step in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for first in range(0, complete, BB):
                b = first + tl.arange(0, BB)
                bits = tl.load(own + b, mask=b < complete, other=0.0).to(tl.int32, bitcast=True)
                same = b < complete
                if step > 0:
                    same = same & ((bits >> (32 - 8 * step)) == prefix)
                counts += tl.histogram((bits >> (24 - 8 * step)) & 255, 256, mask=same)
            # above[d]: how many have a larger digit.
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            found = tl.max(tl.where(above + counts >= wanted, digit, 0), 0)
            wanted -= tl.sum(tl.where(digit == found, above, 0), 0)
            prefix = (prefix << 8) | found
        taken = 0
        ties = 0
        for first in range(0, complete, BB):
            b = first + tl.arange(0, BB)
            inside = b < complete
            bits = tl.load(own + b, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            equal = (inside & (bits == prefix)).to(tl.int32)
            tie_rank = ties + tl.cumsum(equal, 0) - equal
            keep = (inside & (bits > prefix)) | ((equal > 0) & (tie_rank < wanted))
            kept = keep.to(tl.int32)
            place = taken + tl.cumsum(kept, 0) - kept
            if MASK:
                marks = tl.sum(kept.reshape(BB // 16, 16) << tl.arange(0, 16)[None, :], 1)
                word = first // 16 + tl.arange(0, BB // 16)
                words = tl.cdiv(num_blocks, 16)
                tl.store(chosen + row.to(tl.int64) * words + word, marks, mask=word < words)
            else:
                tl.store(chosen + row * BUDGET + place, b, mask=keep & (place < BUDGET))
            taken += tl.sum(kept, 0)
            ties += tl.sum(equal, 0)


@triton.jit
def _attend(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    chosen,
    parts,
    sums,
    row_slots,
    positions,
    capacity,
    scale,
    A: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    BUDGET: tl.constexpr,
    SPLITS: tl.constexpr,
    BC: tl.constexpr,
    PA: tl.constexpr,
    PD: tl.constexpr,
    KV8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, N, SPLITS): parts fp32 [R, SPLITS, A, D] and sums [R, SPLITS, A, 2] (maximum, sum of weights)."""
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = A // N
    visible = early(positions + row, True, 0) + 1
    slot = early(row_slots + row, True, 0).to(tl.int64)
    wait(OVERLAP)
    a = tl.arange(0, PA)
    d = tl.arange(0, PD)
    head = kv * GROUP + a
    in_q = (a[:, None] < GROUP) & (d[None, :] < D)
    query = tl.load(q + (row * A + head[:, None]) * D + d[None, :], mask=in_q, other=0.0)
    sparse = visible > DENSE
    complete = visible // BLOCK
    length = tl.where(sparse, BUDGET * BLOCK + visible - complete * BLOCK, visible)
    per_split = tl.cdiv(tl.cdiv(length, BC), SPLITS)
    base = (slot * N + kv) * capacity
    best = tl.full([PA], -1e30, tl.float32)
    total = tl.zeros([PA], tl.float32)
    acc = tl.zeros([PA, PD], tl.float32)
    first = split * per_split * BC
    for at in range(first, tl.minimum(first + per_split * BC, length), BC):
        i = at + tl.arange(0, BC)
        inside = i < length
        cell = i
        if sparse:
            block = tl.load(chosen + row * BUDGET + i // BLOCK, mask=i < BUDGET * BLOCK, other=0)
            cell = tl.where(
                i < BUDGET * BLOCK, block * BLOCK + i % BLOCK, complete * BLOCK + i - BUDGET * BLOCK
            )
        key = load_cells(k_cache, k_scales, base + cell, d, inside, D, KV8)
        value = load_cells(v_cache, v_scales, base + cell, d, inside, D, KV8)
        score = mma(query, tl.trans(key), tl.zeros([PA, BC], tl.float32)) * scale
        score = tl.where(inside[None, :], score, -1e30)
        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.where(inside[None, :], tl.exp(score - new_best[:, None]), 0.0)
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weight, 1)
        acc = mma(weight.to(tl.bfloat16), value, acc * shrink[:, None])
        best = new_best
    out = (row * SPLITS + split) * A + head
    tl.store(parts + out[:, None] * D + d[None, :], acc, mask=in_q)
    tl.store(sums + out * 2, best, mask=a < GROUP)
    tl.store(sums + out * 2 + 1, total, mask=a < GROUP)


@triton.jit
def _join(
    parts,
    sums,
    projected,
    out,
    A: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    PD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, A): out bf16 [R, A*D] = joined parts times sigmoid of the gate."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, PD)
    start(OVERLAP)
    # Projected before `_attend`, which this kernel overlaps.
    gate = early(projected + row * ROW + (2 * head + 1) * D + d, d < D, 0.0).to(tl.float32)
    gate = sigmoid(gate).to(tl.bfloat16).to(tl.float32)
    wait(OVERLAP)
    at = (row * SPLITS + s) * A + head
    best = tl.load(sums + at * 2)
    total = tl.load(sums + at * 2 + 1)
    shrink = tl.exp(best - tl.max(best, 0))
    part = tl.load(parts + at[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    joined = tl.sum(part * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    value = joined.to(tl.bfloat16).to(tl.float32) * gate
    tl.store(out + (row * A + head) * D + d, value, mask=d < D)


def write_cells(
    projected: Tensor,
    weights: QsaWeights,
    scratch: QsaScratch,
    cos: Tensor,
    sin: Tensor,
    row_slots: Tensor,
    positions: Tensor,
    starts: Tensor,
    state: SlotState,
    spec: QsaSpec,
    eps: float,
) -> None:
    """projected bf16 [R, rows of in_proj] -> the rows' cells in `state`, and scratch.q, scratch.index_q."""
    ring = state.index_ring[weights.index]
    _write(
        projected,
        weights,
        scratch.q,
        scratch.index_q,
        cos,
        sin,
        row_slots,
        positions,
        starts,
        state,
        spec,
        eps,
        ring,
        0,
    )


def write_chunk_cells(
    projected: Tensor,
    weights: QsaWeights,
    q: Tensor,
    index_q: Tensor,
    cos: Tensor,
    sin: Tensor,
    row_slots: Tensor,
    positions: Tensor,
    starts: Tensor,
    state: SlotState,
    spec: QsaSpec,
    eps: float,
) -> None:
    """As `write_cells` for consecutive rows of one slot, more of them than the ring holds."""
    # Rows are written in any order: the last ones must stay in the ring, and old ones be read before they are replaced.
    old = state.index_ring[weights.index].clone()
    first_kept = max(0, projected.shape[0] - RING_ROWS)
    _write(
        projected,
        weights,
        q,
        index_q,
        cos,
        sin,
        row_slots,
        positions,
        starts,
        state,
        spec,
        eps,
        old,
        first_kept,
    )


def _write(
    projected: Tensor,
    weights: QsaWeights,
    q: Tensor,
    index_q: Tensor,
    cos: Tensor,
    sin: Tensor,
    row_slots: Tensor,
    positions: Tensor,
    starts: Tensor,
    state: SlotState,
    spec: QsaSpec,
    eps: float,
    old_ring: Tensor,
    ring_from: int,
) -> None:
    num_rows = projected.shape[0]
    layer = weights.index
    heads = spec.num_heads + 2 * spec.num_kv_heads + spec.num_index_heads + 1
    _write_cells[(num_rows, heads)](
        projected,
        weights.q_norm,
        weights.k_norm,
        weights.index_q_norm,
        weights.index_k_norm,
        cos,
        sin,
        q,
        index_q,
        *cells_of(state, layer),
        state.index_ring[layer],
        old_ring,
        state.index_blocks[layer],
        row_slots,
        positions,
        starts,
        eps,
        state.capacity,
        state.index_blocks.shape[2],
        ring_from,
        A=spec.num_heads,
        N=spec.num_kv_heads,
        D=spec.head_dim,
        IH=spec.num_index_heads,
        ID=spec.index_dim,
        BLOCK=spec.block_tokens,
        ROT=spec.rotary_dim,
        RING=RING_ROWS,
        PD=triton.next_power_of_2(spec.head_dim),
        PI=triton.next_power_of_2(spec.index_dim),
        KV8=state.k_scale is not None,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(1, 1),
    )


def cells_of(state: SlotState, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, V and their scales of one layer; without scales K and V stand in for them, unread."""
    k_scale, v_scale = state.k_scale, state.v_scale
    if k_scale is None or v_scale is None:
        return state.k[layer], state.v[layer], state.k[layer], state.v[layer]
    return state.k[layer], state.v[layer], k_scale[layer], v_scale[layer]


def attend(
    projected: Tensor,
    weights: QsaWeights,
    scratch: QsaScratch,
    row_slots: Tensor,
    positions: Tensor,
    state: SlotState,
    spec: QsaSpec,
    out: Tensor,
) -> None:
    """Rows described by scratch.q, scratch.index_q and the gates in `projected` -> out bf16 [R, A*D]."""
    num_rows = projected.shape[0]
    layer = weights.index
    if state.capacity > spec.dense_tokens:
        _choose_blocks(num_rows, weights, scratch, row_slots, positions, state, spec)
    dim = max(16, triton.next_power_of_2(spec.head_dim))
    group = spec.num_heads // spec.num_kv_heads
    _attend[(num_rows, spec.num_kv_heads, SPLITS)](
        scratch.q,
        *cells_of(state, layer),
        scratch.blocks,
        scratch.parts,
        scratch.sums,
        row_slots,
        positions,
        state.capacity,
        spec.head_dim**-0.5,
        A=spec.num_heads,
        N=spec.num_kv_heads,
        D=spec.head_dim,
        BLOCK=spec.block_tokens,
        DENSE=spec.dense_tokens,
        BUDGET=spec.budget_blocks,
        SPLITS=SPLITS,
        BC=_KEY_TILE,
        PA=max(16, triton.next_power_of_2(group)),
        PD=dim,
        KV8=state.k_scale is not None,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 2),
    )
    _join[(num_rows, spec.num_heads)](
        scratch.parts,
        scratch.sums,
        projected,
        out,
        A=spec.num_heads,
        D=spec.head_dim,
        ROW=projected.shape[1],
        SPLITS=SPLITS,
        PD=dim,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(2, 1),
    )


def _choose_blocks(
    num_rows: int,
    weights: QsaWeights,
    scratch: QsaScratch,
    row_slots: Tensor,
    positions: Tensor,
    state: SlotState,
    spec: QsaSpec,
) -> None:
    stride = scratch.scores.shape[1]
    blocks = state.index_blocks[weights.index]
    assert stride == blocks.shape[1]
    _score[(num_rows, _SCORE_PROGRAMS)](
        scratch.index_q,
        blocks,
        scratch.scores,
        row_slots,
        positions,
        stride,
        IH=spec.num_index_heads,
        ID=spec.index_dim,
        BLOCK=spec.block_tokens,
        DENSE=spec.dense_tokens,
        PROGRAMS=_SCORE_PROGRAMS,
        BB=_SCORE_TILE,
        PI=triton.next_power_of_2(spec.index_dim),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 2),
    )
    select_blocks(scratch.scores[:num_rows], scratch.blocks, positions, spec)


def select_blocks(
    scores: Tensor, chosen: Tensor, positions: Tensor, spec: QsaSpec, *, marks: bool = False
) -> None:
    """scores fp32 [R, blocks] -> chosen: int32 [R, budget], ascending; or int32 [R, ceil(blocks / 16)], 16 marks each.

    Rows that see no more than the budget are left alone.
    """
    _select[(scores.shape[0],)](
        scores,
        chosen,
        positions,
        scores.shape[1],
        BLOCK=spec.block_tokens,
        DENSE=spec.dense_tokens,
        BUDGET=spec.budget_blocks,
        BB=_SELECT_TILE,
        MASK=marks,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(8, 1),
    )
