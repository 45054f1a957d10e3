"""Kernels that read a prompt piece: what between its matrix products the libraries have no fast operation for.

Numbers that differ from piece to piece are not specialised on: a kernel is compiled once, before anything is served.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false
# ruff: noqa: E741 - I is the width of an expert

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.moe import expert_at, multiply4
from engine.cuda.primitives import LAUNCH, mma, sigmoid, wait
from engine.cuda.qsa import cells_of, load_cells, select_blocks
from engine.cuda.quant import GROUP, QUARTER, TILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.cuda.moe import MoeWeights
    from engine.cuda.qsa import QsaWeights
    from engine.cuda.quant import Packed4
    from engine.cuda.tiers import FarExperts, StagedExperts
    from engine.model_spec import MoeSpec, QsaSpec
    from engine.state import SlotState

DELTA_ROWS = 64
"""Rows that the delta rule takes at once."""
_EXPERT_ROWS = 64
_FETCH_LINES = 256
"""Lines of a far expert that one program copies."""


@triton.jit
def _mix(
    up,
    normed,
    scale,
    out,
    H: tl.constexpr,
    S: tl.constexpr,
    BH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, tiles of columns): out [T, H] = sum over streams of sigmoid(up) * normed * scale, each [T, S*H]."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    wait(OVERLAP)
    total = tl.zeros([BH], tl.float32)
    for s in tl.static_range(S):
        at = row * (S * H) + s * H + h
        gate = sigmoid(tl.load(up + at, mask=h < H, other=0.0).to(tl.float32))
        value = tl.load(normed + at, mask=h < H, other=0.0).to(tl.float32)
        total += gate * value * tl.load(scale + s * H + h, mask=h < H, other=0.0)
    tl.store(out + row * H + h, total, mask=h < H)


def mix_streams(up: Tensor, normed: Tensor, scale: Tensor, num_streams: int) -> Tensor:
    """up, normed bf16 [T, S*H], scale fp32 [S*H] -> bf16 [T, H]."""
    num_rows, width = normed.shape
    hidden = width // num_streams
    out = normed.new_empty(num_rows, hidden)
    _mix[(num_rows, triton.cdiv(hidden, 1024))](
        up,
        normed,
        scale,
        out,
        H=hidden,
        S=num_streams,
        BH=1024,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
    return out


@triton.jit(do_not_specialize=["T", "CHUNKS"])
def _solve(
    qkv,
    gates,
    inverse,
    scores,
    totals,
    T,
    CHUNKS,
    V: tl.constexpr,
    REPEAT: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    PK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (chunks, value heads): what of a chunk does not depend on S.

    inverse fp32 [V, chunks, L, L] of I + A, A_ij = beta_i exp(g_i - g_j) k_i.k_j below the diagonal; scores likewise of
    q and k, with the diagonal and without beta; totals fp32 [V, chunks, L]: running sums of log decays.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    t = tl.arange(0, L)
    i = tl.arange(0, PK)
    wait(OVERLAP)
    row = chunk * L + t
    in_row = row < T
    inside = in_row[:, None] & (i < DK)[None, :]
    at = qkv + row[:, None].to(tl.int64) * C + head // REPEAT * DK + i[None, :]
    q = tl.load(at, mask=inside, other=0.0)
    k = tl.load(at + V // REPEAT * DK, mask=inside, other=0.0)
    gate = gates + (row * V + head) * 2
    total = tl.cumsum(tl.load(gate, mask=in_row, other=0.0), 0)
    beta = tl.load(gate + 1, mask=in_row, other=0.0)
    base = (head * CHUNKS + chunk).to(tl.int64) * L
    tl.store(totals + base + t, total)
    # Only differences that are at most 0 are exponentiated.
    ratio = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    square = (base + t)[:, None] * L + t[None, :]
    score = tl.dot(q, tl.trans(k), input_precision="tf32x3") * ratio
    tl.store(scores + square, tl.where(t[:, None] >= t[None, :], score, 0.0))
    system = tl.dot(k, tl.trans(k), input_precision="tf32x3") * ratio * beta[:, None]
    system = tl.where(t[:, None] > t[None, :], system, 0.0)
    solved = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for r in range(1, L):
        # Row r of the inverse: the unit row less what the rows above, already solved, contribute.
        factors = tl.sum(tl.where(t[:, None] == r, system, 0.0), 0)
        lower = tl.sum(factors[:, None] * solved, 0)
        solved = tl.where(t[:, None] == r, solved - lower[None, :], solved)
    tl.store(inverse + square, solved)


@triton.jit(do_not_specialize=["T", "CHUNKS"])
def _scan(
    qkv,
    gates,
    inverse,
    scores,
    totals,
    s,
    out,
    T,
    CHUNKS,
    V: tl.constexpr,
    REPEAT: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    PK: tl.constexpr,
    BV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (value heads, tiles of columns): chunk after chunk; out fp32 [T, V*DV], s fp32 [V, DK, DV] advanced.

    The updates of a chunk are d = inverse (beta (v - exp(g) k S)).
    """
    head = tl.program_id(0)
    iv = tl.program_id(1) * BV + tl.arange(0, BV)
    ik = tl.arange(0, PK)
    t = tl.arange(0, L)
    wait(OVERLAP)
    in_v = (iv < DV)[None, :]
    in_k = (ik < DK)[None, :]
    own_s = s + head * (DK * DV) + ik[:, None] * DV + iv[None, :]
    in_s = (ik < DK)[:, None] & in_v
    state = tl.load(own_s, mask=in_s, other=0.0)
    for c in range(CHUNKS):
        row = c * L + t
        in_row = (row < T)[:, None]
        base = (head * CHUNKS + c).to(tl.int64) * L
        square = (base + t)[:, None] * L + t[None, :]
        at = qkv + row[:, None].to(tl.int64) * C
        q = tl.load(at + head // REPEAT * DK + ik[None, :], mask=in_row & in_k, other=0.0)
        k = tl.load(at + (V + head) // REPEAT * DK + ik[None, :], mask=in_row & in_k, other=0.0)
        v = tl.load(
            at + 2 * (V // REPEAT) * DK + head * DV + iv[None, :], mask=in_row & in_v, other=0.0
        )
        beta = tl.load(gates + (row * V + head) * 2 + 1, mask=row < T, other=0.0)
        total = tl.load(totals + base + t)
        last = tl.load(totals + base + L - 1)
        grown = tl.exp(total)[:, None]
        wanted = (v - grown * tl.dot(k, state, input_precision="tf32")) * beta[:, None]
        delta = tl.dot(tl.load(inverse + square), wanted, input_precision="tf32")
        o = grown * tl.dot(q, state, input_precision="tf32")
        o += tl.dot(tl.load(scores + square), delta, input_precision="tf32")
        tl.store(
            out + row[:, None].to(tl.int64) * (V * DV) + head * DV + iv[None, :],
            o,
            mask=in_row & in_v,
        )
        keys = k * tl.exp(last - total)[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(keys), delta, input_precision="tf32")
    tl.store(own_s, state, mask=in_s)


def delta_rule(qkv: Tensor, gates: Tensor, s: Tensor, num_key_heads: int) -> Tensor:
    """The recurrence over T rows in chunks (engine.layers.gdn.chunked_delta_rule). Returns fp32 [T, V*dv].

    qkv fp32 [T, C], q and k of unit length; gates fp32 [T, V, 2]: log decay and beta; s fp32 [V, dk, dv] is advanced.
    Sums and S are fp32; products of a chunk take their factors with 10 bits of mantissa.
    """
    num_values, dk, dv = s.shape
    num_rows, channels = qkv.shape
    chunks = triton.cdiv(num_rows, DELTA_ROWS)
    inverse, scores = torch.empty(2, num_values, chunks, DELTA_ROWS, DELTA_ROWS, device=qkv.device)
    totals = torch.empty(num_values, chunks, DELTA_ROWS, device=qkv.device)
    out = torch.empty(num_rows, num_values * dv, device=qkv.device)
    pk = max(16, triton.next_power_of_2(dk))
    common = {
        "V": num_values,
        "REPEAT": num_values // num_key_heads,
        "DK": dk,
        "C": channels,
        "L": DELTA_ROWS,
        "PK": pk,
        "OVERLAP": LAUNCH.overlap,
    }
    _solve[(chunks, num_values)](
        qkv, gates, inverse, scores, totals, num_rows, chunks, **common, **LAUNCH.options(4, 1)
    )
    tile = max(16, min(32, triton.next_power_of_2(dv)))
    _scan[(num_values, triton.cdiv(dv, tile))](
        qkv,
        gates,
        inverse,
        scores,
        totals,
        s,
        out,
        num_rows,
        chunks,
        DV=dv,
        BV=tile,
        **common,
        **LAUNCH.options(4, 2),
    )
    return out


@triton.jit(do_not_specialize=["T", "num_blocks"])
def _scores(
    index_q,
    blocks,
    out,
    positions,
    T,
    num_blocks,
    IH: tl.constexpr,
    ID: tl.constexpr,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
    BB: tl.constexpr,
    PI: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of rows, tiles of blocks): out fp32 [T, blocks]; tiles that no row has complete are left alone."""
    r = tl.program_id(0) * BT + tl.arange(0, BT)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    i = tl.arange(0, PI)
    wait(OVERLAP)
    position = tl.load(positions + r, mask=r < T, other=0)
    if tl.program_id(1) * BB < (tl.max(position, 0) + 1) // BLOCK:
        key = tl.load(
            blocks + b[None, :] * ID + i[:, None],
            mask=(b[None, :] < num_blocks) & (i[:, None] < ID),
            other=0.0,
        )
        total = tl.zeros([BT, BB], tl.float32)
        for h in tl.static_range(IH):
            at = (r[:, None] * IH + h) * ID + i[None, :]
            q = tl.load(index_q + at, mask=(r[:, None] < T) & (i[None, :] < ID), other=0.0)
            total += tl.maximum(mma(q, key, tl.zeros([BT, BB], tl.float32)), 0.0)
        inside = (r[:, None] < T) & (b[None, :] < num_blocks)
        tl.store(out + r[:, None].to(tl.int64) * num_blocks + b[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["start", "T", "words"])
def _list_tiles(
    chosen,
    tiles,
    counts,
    start,
    T,
    words,
    stride,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of rows): the tiles of keys that some row attends to, rising: tiles int32 [., stride], counts [.].

    A row's own end, behind its last complete block, is in no mark; rows of a short context attend to everything.
    """
    tile = tl.program_id(0)
    m = tile * BM + tl.arange(0, BM)
    wait(OVERLAP)
    first = start + tile * BM
    num_tiles = tl.cdiv(start + tl.minimum(tile * BM + BM, T), BC)
    own = tl.maximum(first - BLOCK, 0) // BC
    count = 0
    for at in range(0, num_tiles, BW):
        w = at + tl.arange(0, BW)
        marks = tl.load(
            chosen + m[:, None].to(tl.int64) * words + w[None, :],
            mask=(m < T)[:, None] & (w < words)[None, :],
            other=0,
        )
        is_marked = tl.max((marks != 0).to(tl.int32), 0) != 0
        needed = (is_marked | (w >= own) | (first < DENSE)) & (w < num_tiles)
        place = count + tl.cumsum(needed.to(tl.int32), 0) - 1
        tl.store(tiles + tile * stride + place, w, mask=needed)
        count += tl.sum(needed.to(tl.int32), 0)
    tl.store(counts + tile, count)


@triton.jit(do_not_specialize=["start", "T", "words"])
def _attend(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    chosen,
    tiles,
    counts,
    projected,
    out,
    start,
    T,
    words,
    stride,
    scale,
    GROUP: tl.constexpr,
    A: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    SPARSE: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    PD: tl.constexpr,
    KV8: tl.constexpr,
    OVERLAP: tl.constexpr,
    capacity,
):
    """Grid (tiles of rows, A): out bf16 [T, A*D], gated. k_cache, v_cache: one slot's [N, capacity, D].

    tiles, counts: see _list_tiles; tiles of keys that no row attends to are left out.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    m = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, PD)
    wait(OVERLAP)
    position = start + m
    in_q = (m[:, None] < T) & (d[None, :] < D)
    query = tl.load(q + (m[:, None].to(tl.int64) * A + head) * D + d[None, :], mask=in_q, other=0.0)
    base = (head // GROUP).to(tl.int64) * capacity
    complete = (position + 1) // BLOCK
    best = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, PD], tl.float32)
    end = start + tl.minimum(tile * BM + BM, T)
    if SPARSE:
        num_tiles = tl.load(counts + tile)
    else:
        num_tiles = tl.cdiv(end, BC)
    for i in range(0, num_tiles):
        if SPARSE:
            first = tl.load(tiles + tile * stride + i) * BC
        else:
            first = i * BC
        c = first + tl.arange(0, BC)
        key = load_cells(k_cache, k_scales, base + c, d, c < end, D, KV8)
        value = load_cells(v_cache, v_scales, base + c, d, c < end, D, KV8)
        score = mma(query, tl.trans(key), tl.zeros([BM, BC], tl.float32)) * scale
        allowed = c[None, :] <= position[:, None]
        if SPARSE:
            # A tile of keys is 16 blocks: one word of marks a row.
            marks = tl.load(
                chosen + m.to(tl.int64) * words + first // BC,
                mask=(m < T) & (first // BC < words),
                other=0,
            )
            marked = (marks[:, None] >> ((c - first) // BLOCK)[None, :]) & 1
            tail = c[None, :] >= (complete * BLOCK)[:, None]
            allowed = allowed & ((marked != 0) | tail | (position[:, None] < DENSE))
        score = tl.where(allowed, score, -1e30)
        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.where(allowed, tl.exp(score - new_best[:, None]), 0.0)
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weight, 1)
        acc = mma(weight.to(tl.bfloat16), value, acc * shrink[:, None])
        best = new_best
    joined = (acc / total[:, None]).to(tl.bfloat16).to(tl.float32)
    gate_at = projected + m[:, None].to(tl.int64) * ROW + (2 * head + 1) * D + d[None, :]
    gate = (
        sigmoid(tl.load(gate_at, mask=in_q, other=0.0).to(tl.float32))
        .to(tl.bfloat16)
        .to(tl.float32)
    )
    tl.store(out + (m[:, None].to(tl.int64) * A + head) * D + d[None, :], joined * gate, mask=in_q)


def needed_tiles(
    chosen: Tensor, start: int, num_rows: int, row_tile: int, spec: QsaSpec
) -> tuple[Tensor, Tensor]:
    """Of each tile of rows the tiles of keys that it attends to, int32 [tiles, most], and how many, int32 [tiles].

    chosen: marks of blocks, int32 [T, words].
    """
    keys = 16 * spec.block_tokens
    num_tiles = triton.cdiv(num_rows, row_tile)
    tiles = chosen.new_empty(num_tiles, triton.cdiv(start + num_rows, keys))
    counts = chosen.new_empty(num_tiles)
    _list_tiles[(num_tiles,)](
        chosen,
        tiles,
        counts,
        start,
        num_rows,
        chosen.shape[1],
        tiles.shape[1],
        BLOCK=spec.block_tokens,
        DENSE=spec.dense_tokens,
        BM=row_tile,
        BC=keys,
        BW=64,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
    return tiles, counts


def attend_chunk(
    projected: Tensor,
    weights: QsaWeights,
    q: Tensor,
    index_q: Tensor,
    positions: Tensor,
    slot: int,
    start: int,
    state: SlotState,
    spec: QsaSpec,
) -> Tensor:
    """Rows at [start, start + T) of one slot, whose cells are written -> bf16 [T, A*D], gated."""
    num_rows = q.shape[0]
    end = start + num_rows
    layer = weights.index
    sparse = end > spec.dense_tokens
    num_blocks = end // spec.block_tokens
    chosen = q
    if sparse:
        blocks = state.index_blocks[layer, slot, :num_blocks]
        scores = torch.empty(num_rows, num_blocks, device=q.device)
        _scores[(triton.cdiv(num_rows, 64), triton.cdiv(num_blocks, 64))](
            index_q,
            blocks,
            scores,
            positions,
            num_rows,
            num_blocks,
            IH=spec.num_index_heads,
            ID=spec.index_dim,
            BLOCK=spec.block_tokens,
            BT=64,
            BB=64,
            PI=max(16, triton.next_power_of_2(spec.index_dim)),
            OVERLAP=LAUNCH.overlap,
            **LAUNCH.options(4, 2),
        )
        chosen = torch.empty(
            num_rows, triton.cdiv(num_blocks, 16), dtype=torch.int32, device=q.device
        )
        select_blocks(scores, chosen, positions, spec, marks=True)
    out = q.new_empty(num_rows, spec.num_heads * spec.head_dim)
    dim = max(16, triton.next_power_of_2(spec.head_dim))
    tile = 128 if dim > 64 else 64
    needed = needed_tiles(chosen, start, num_rows, tile, spec) if sparse else (chosen, chosen)
    _attend[(triton.cdiv(num_rows, tile), spec.num_heads)](
        q,
        *(cells[slot] for cells in cells_of(state, layer)),
        chosen,
        *needed,
        projected,
        out,
        start,
        num_rows,
        triton.cdiv(num_blocks, 16),
        needed[0].shape[-1],
        spec.head_dim**-0.5,
        GROUP=spec.num_heads // spec.num_kv_heads,
        A=spec.num_heads,
        D=spec.head_dim,
        ROW=projected.shape[1],
        BLOCK=spec.block_tokens,
        DENSE=spec.dense_tokens,
        SPARSE=sparse,
        BM=tile,
        BC=16 * spec.block_tokens,
        PD=dim,
        KV8=state.k_scale is not None,
        OVERLAP=LAUNCH.overlap,
        capacity=state.capacity,
        **LAUNCH.options(8 if tile == 128 else 4, 2),
    )
    return out


@triton.jit(do_not_specialize=["first"])
def _fetch(
    words,
    scales,
    ids,
    counts,
    staged_words,
    staged_scales,
    first,
    LINES: tl.constexpr,
    BL: tl.constexpr,
    QUARTER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (runs of lines, experts): copy the far experts from the first-th on that any row chose."""
    wait(OVERLAP)
    far = first + tl.program_id(1)
    if tl.load(counts + tl.load(ids + far)) > 0:
        line = tl.program_id(0) * BL + tl.arange(0, BL)
        q = tl.arange(0, QUARTER)
        source = far.to(tl.int64) * LINES + line
        target = tl.program_id(1).to(tl.int64) * LINES + line
        inside = line < LINES
        value = tl.load(words + source[:, None] * QUARTER + q[None, :], mask=inside[:, None])
        tl.store(staged_words + target[:, None] * QUARTER + q[None, :], value, mask=inside[:, None])
        scale = tl.load(scales + source, mask=inside)
        tl.store(staged_scales + target, scale, mask=inside)


def _fetch_part(
    part: Packed4, far: FarExperts, counts: Tensor, staged: Packed4, run: range
) -> None:
    lines = part.scales[0].numel()
    _fetch[(triton.cdiv(lines, _FETCH_LINES), len(run))](
        part.words,
        part.scales,
        far.ids,
        counts,
        staged.words,
        staged.scales,
        run.start,
        LINES=lines,
        BL=_FETCH_LINES,
        QUARTER=QUARTER,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )


@triton.jit
def _place_of(expert, order, low, high, E: tl.constexpr, TIERS: tl.constexpr):
    """Whether a tile's expert is of this pass, and its number there: by the expert's address, or among those staged.

    TIERS 0: experts lie in their order, and only a tile behind the last has none; 1: this pass takes those whose place
    in `order` is from low to high, by address; 2: the same, staged in that order.
    """
    mine = expert < E
    place = expert
    if TIERS > 0:
        at = tl.load(order + tl.minimum(expert, E - 1))
        mine = mine & (at >= low) & (at < high)
        if TIERS == 2:
            place = at - low
    return mine, place


@triton.jit(do_not_specialize=["low", "high"])
def _experts_up(
    x,
    words,
    scales,
    addresses,
    places,
    low,
    high,
    order,
    tile_expert,
    tile_first,
    ends,
    hidden,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    I: tl.constexpr,
    TOP: tl.constexpr,
    E: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,
    TILE: tl.constexpr,
    TIERS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of gate and up rows, tiles of sorted pairs): hidden bf16 [pairs as sorted, I] = silu(gate) * up."""
    tile = tl.program_id(0)
    wait(OVERLAP)
    expert = tl.load(tile_expert + tl.program_id(1))
    mine, at = _place_of(expert, places, low, high, E, TIERS)
    if mine:
        place = tl.load(tile_first + tl.program_id(1)) + tl.arange(0, BM)
        rows = place < tl.load(ends + expert)
        pair = tl.load(order + place, mask=rows, other=0)
        n = tile * BN + tl.arange(0, BN)
        own_words, own_scales = expert_at(
            words, scales, addresses, at, TILES * GROUPS * TILE, QUARTER, TIERS == 1
        )
        acc = multiply4(
            own_words,
            own_scales,
            n,
            x + (pair // TOP)[None, :].to(tl.int64) * H,
            rows,
            H,
            GROUPS,
            BN,
            BM,
            GROUP,
            QUARTER,
            TILE,
            TILES,
        )
        pairs = acc.to(tl.bfloat16).to(tl.float32).reshape(BN // 2, 2, BM)
        gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
        middle = (gate * sigmoid(gate)).to(tl.bfloat16).to(tl.float32) * up
        i = tile * (BN // 2) + tl.arange(0, BN // 2)
        tl.store(
            hidden + place[None, :].to(tl.int64) * I + i[:, None],
            middle,
            mask=rows[None, :] & (i[:, None] < I),
        )


@triton.jit(do_not_specialize=["low", "high"])
def _experts_down(
    hidden,
    words,
    scales,
    addresses,
    places,
    low,
    high,
    order,
    tile_expert,
    tile_first,
    ends,
    parts,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,
    TILE: tl.constexpr,
    TIERS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of output columns, tiles of sorted pairs): parts bf16 [pairs, H]."""
    wait(OVERLAP)
    expert = tl.load(tile_expert + tl.program_id(1))
    mine, at = _place_of(expert, places, low, high, E, TIERS)
    if mine:
        place = tl.load(tile_first + tl.program_id(1)) + tl.arange(0, BM)
        rows = place < tl.load(ends + expert)
        pair = tl.load(order + place, mask=rows, other=0)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        own_words, own_scales = expert_at(
            words, scales, addresses, at, TILES * GROUPS * TILE, QUARTER, TIERS == 1
        )
        acc = multiply4(
            own_words,
            own_scales,
            n,
            hidden + place[None, :].to(tl.int64) * I,
            rows,
            I,
            GROUPS,
            BN,
            BM,
            GROUP,
            QUARTER,
            TILE,
            TILES,
        )
        tl.store(
            parts + pair[None, :].to(tl.int64) * H + n[:, None],
            acc,
            mask=rows[None, :] & (n[:, None] < H),
        )


@triton.jit
def _combine(
    shared,
    head,
    weights,
    parts,
    streams,
    inject,
    H: tl.constexpr,
    E: tl.constexpr,
    ROW: tl.constexpr,
    TOP: tl.constexpr,
    S: tl.constexpr,
    BH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, tiles of columns): streams += inject (x) (sigmoid(shared gate) * shared + sum of weighted parts)."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    wait(OVERLAP)
    inside = h < H
    gate = sigmoid(tl.load(head + row * ROW + E).to(tl.float32))
    y = tl.load(shared + row * H + h, mask=inside, other=0.0).to(tl.float32) * gate
    for rank in tl.static_range(TOP):
        part = tl.load(parts + (row * TOP + rank) * H + h, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(weights + row * TOP + rank) * part
    y = y.to(tl.bfloat16).to(tl.float32)
    for s in tl.static_range(S):
        at = streams + row * (S * H) + s * H + h
        factor = tl.load(inject + row * S + s).to(tl.float32)
        tl.store(at, tl.load(at, mask=inside, other=0.0).to(tl.float32) + factor * y, mask=inside)


def experts_into_streams(
    x: Tensor,
    head: Tensor,
    weights: MoeWeights,
    top: Tensor,
    ids: Tensor,
    shared: Tensor,
    streams: Tensor,
    inject: Tensor,
    spec: MoeSpec,
    staged: StagedExperts | None = None,
) -> Tensor:
    """streams [T, S*H] += outer(inject [T, S], MoE of x [T, H]); top fp32 and ids int32 [T, k], shared bf16 [T, H].

    staged: through which far experts are read, if there are any. Returns how many rows chose each expert, int64 [E].
    """
    num_rows, hidden_size = x.shape
    count = spec.num_experts
    flat = ids.flatten().to(torch.int64)
    order = flat.argsort(stable=True)
    counts = torch.zeros(count, dtype=torch.int64, device=x.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    ends = counts.cumsum(0)
    last_tiles = ((counts + (_EXPERT_ROWS - 1)) // _EXPERT_ROWS).cumsum(0)
    num_tiles = triton.cdiv(flat.shape[0], _EXPERT_ROWS) + min(count, flat.shape[0])
    tile = torch.arange(num_tiles, device=x.device)
    expert = torch.searchsorted(last_tiles, tile, right=True)
    at = expert.clamp_max(count - 1)
    before = last_tiles[at] - (counts[at] + (_EXPERT_ROWS - 1)) // _EXPERT_ROWS
    first = ends[at] - counts[at] + (tile - before) * _EXPERT_ROWS
    hidden = x.new_empty(flat.shape[0], spec.expert_dim)
    parts = x.new_empty(flat.shape[0], hidden_size)
    where = [t.to(torch.int32) for t in (order, expert, first, ends)]
    rows = 128
    common = {
        "I": spec.expert_dim,
        "H": hidden_size,
        "E": count,
        "BN": rows,
        "BM": _EXPERT_ROWS,
        "GROUP": GROUP,
        "QUARTER": QUARTER,
        "TILE": TILE,
        "OVERLAP": LAUNCH.overlap,
        **LAUNCH.options(4, 3),
    }
    for part in _passes(weights, staged, counts, num_rows):
        up, down = part.gate_up, part.down
        chosen = (part.order, part.low, part.high)
        _experts_up[(triton.cdiv(2 * spec.expert_dim, rows), num_tiles)](
            x,
            up.words,
            up.scales,
            part.up_at,
            *chosen,
            *where,
            hidden,
            GROUPS=up.num_groups,
            TILES=up.words.shape[1],
            TOP=spec.num_active,
            TIERS=part.tiers,
            **common,
        )
        _experts_down[(triton.cdiv(hidden_size, rows), num_tiles)](
            hidden,
            down.words,
            down.scales,
            part.down_at,
            *chosen,
            *where,
            parts,
            GROUPS=down.num_groups,
            TILES=down.words.shape[1],
            TIERS=part.tiers,
            **common,
        )
    _combine[(num_rows, triton.cdiv(hidden_size, 1024))](
        shared,
        head,
        top,
        parts,
        streams,
        inject,
        H=hidden_size,
        E=count,
        ROW=head.shape[1],
        TOP=spec.num_active,
        S=inject.shape[1],
        BH=1024,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
    return counts


@dataclass(frozen=True, slots=True)
class _Pass:
    """The experts that one pair of launches multiplies: see `_place_of`."""

    gate_up: Packed4
    down: Packed4
    up_at: Tensor
    down_at: Tensor
    order: Tensor
    low: int
    high: int
    tiers: int


def _passes(
    weights: MoeWeights, staged: StagedExperts | None, counts: Tensor, num_rows: int
) -> Iterator[_Pass]:
    """All experts at once; or those on the device, then the far ones a few at a time, each of them fetched before.

    Several tiles of rows would each read a far expert over the bus; as long as no expert has two, nothing is staged.
    """
    up, down, far = weights.gate_up, weights.down, weights.far
    if far is None:
        yield _Pass(up, down, up.words, down.words, up.words, 0, 0, 0)
        return
    count = far.count
    by_address = _Pass(up, down, far.up_at, far.down_at, far.order, -1, count, 1)
    if count == 0 or num_rows <= _EXPERT_ROWS:
        yield by_address
        return
    assert staged is not None
    yield replace(by_address, high=0)
    for first in range(0, count, staged.count):
        run = range(first, min(first + staged.count, count))
        _fetch_part(far.gate_up, far, counts, staged.gate_up, run)
        _fetch_part(far.down, far, counts, staged.down, run)
        yield replace(
            by_address,
            gate_up=staged.gate_up,
            down=staged.down,
            low=run.start,
            high=run.stop,
            tiers=2,
        )
