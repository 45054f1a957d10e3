"""Gated DeltaNet for a window's rows and its commit (model.md 1.4; D4): programs hold columns of one head's S.

Between the two projections one kernel convolves the heads, one runs the recurrence over the slot's rows, and one norms
its output. The recurrence stores S after the first row and leaves what `commit` replays for the others.
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
from engine.cuda.primitives import LAUNCH, early, sigmoid, start, wait

GATE_ROWS = 64
"""Most rows whose output is normed and gated head by head."""

if TYPE_CHECKING:
    from engine.cuda.layout import WindowLayout
    from engine.model_spec import GdnSpec
    from engine.state import SlotState


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """in_proj bf16 [C + V*dv + 2*V, H]; conv bf16 [width, C]; decay = -exp(A_log), dt_bias fp32 [V]; norm bf16 [dv];
    out_proj bf16 [H, V*dv]."""

    in_proj: Tensor
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        parts = (self.in_proj, self.conv, self.decay, self.dt_bias, self.norm, self.out_proj)
        return sum(t.numel() * t.element_size() for t in parts)


@triton.jit(do_not_specialize=["R"])
def _heads(
    projected,
    conv,
    decay,
    dt_bias,
    history,
    qkv,
    gates,
    row_slots,
    starts,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BT: tl.constexpr,
    P: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of rows, 2*K + V): one head of q, k or v, convolved, and q and k of unit length: qkv fp32 [R, C].

    Keeps the rows' convolution inputs; a value head also gives its gates fp32 [R, V, 2]: decay factor and beta. With
    CHUNK it keeps nothing and gives the decay's logarithm.
    """
    start(OVERLAP)
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    ROW: tl.constexpr = C + V * DV + 2 * V
    i = tl.arange(0, P)
    is_key = head < 2 * K
    channel = tl.where(is_key, head * DK, 2 * K * DK + (head - 2 * K) * DV) + i
    in_row = row < R
    inside = in_row[:, None] & (i < tl.where(is_key, DK, DV))[None, :]
    slot = early(row_slots + row, in_row, 0).to(tl.int64)
    j = (row - early(starts + row, in_row, 0))[:, None]
    own = projected + row[:, None] * ROW + channel[None, :]
    past = history + (slot * ((WIDTH - 1 + ROWS) * C))[:, None] + channel[None, :]
    in_head = i < tl.where(is_key, DK, DV)
    total = tl.zeros([BT, P], tl.float32)
    # Taps before the window come first: the history is what was kept of the window before. This window's rows are
    # written behind it.
    for tap in tl.static_range(WIDTH - 1):
        old = early(past + (j + tap) * C, inside & (j + tap < WIDTH - 1), 0.0)
        factor = tl.load(conv + tap * C + channel, mask=in_head, other=0.0)
        total += old.to(tl.float32) * factor.to(tl.float32)[None, :]
    wait(OVERLAP)
    for tap in tl.static_range(WIDTH):
        back = tap - (WIDTH - 1)
        new = tl.load(own + back * ROW, mask=inside & (j + back >= 0), other=0.0)
        factor = tl.load(conv + tap * C + channel, mask=in_head, other=0.0)
        total += new.to(tl.float32) * factor.to(tl.float32)[None, :]
        if back == 0 and not CHUNK:
            tl.store(past + (WIDTH - 1 + j) * C, new, mask=inside)
    total = total.to(tl.bfloat16).to(tl.float32)
    value = (total * sigmoid(total)).to(tl.bfloat16).to(tl.float32)
    if is_key:
        scale = tl.rsqrt(tl.sum(value * value, 1) + 1e-6) * tl.where(head < K, DK**-0.5, 1.0)
        value *= scale[:, None]
    else:
        v = head - 2 * K
        at = projected + row * ROW + C + V * DV + v
        b = tl.load(at, mask=in_row, other=0.0).to(tl.float32)
        a = tl.load(at + V, mask=in_row, other=0.0).to(tl.float32) + tl.load(dt_bias + v)
        soft = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
        log_decay = soft * tl.load(decay + v)
        tl.store(gates + (row * V + v) * 2, log_decay if CHUNK else tl.exp(log_decay), mask=in_row)
        tl.store(gates + (row * V + v) * 2 + 1, sigmoid(b), mask=in_row)
    tl.store(qkv + row[:, None] * C + channel[None, :], value, mask=inside)


@triton.jit
def _steps(
    qkv,
    gates,
    out,
    s,
    replay_k,
    replay_delta,
    replay_factor,
    slots,
    firsts,
    counts,
    V: tl.constexpr,
    REPEAT: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PK: tl.constexpr,
    BV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (places of the window, value heads, tiles of columns): the recurrence, out fp32 [R, V*DV].

    One warp holds its columns of S, so that sums over the key axis need no barrier.
    """
    place = tl.program_id(0)
    head = tl.program_id(1)
    ik = tl.arange(0, PK)
    iv = tl.program_id(2) * BV + tl.arange(0, BV)
    in_k = ik < DK
    in_v = iv < DV
    both = in_k[:, None] & in_v[None, :]
    count = early(counts + place, True, 0)
    slot = early(slots + place, True, 0).to(tl.int64)
    first = early(firsts + place, True, 0)
    # S is what was kept of the window before: `_heads`, which lets this kernel start, and the product before that leave
    # it alone. No other program has these columns.
    own_s = s + (slot * V + head) * (DK * DV) + ik[:, None] * DV + iv[None, :]
    state = early(own_s, both & (count > 0), 0.0)
    wait(OVERLAP)
    if count > 0:
        q, k, v, factor, beta = _row(
            qkv, gates, first, head, ik, iv, in_k, in_v, V, REPEAT, DK, DV, C
        )
        for j in range(count):
            row = first + j
            # The next row is on its way meanwhile; after the last one, the last again.
            following = tl.minimum(row + 1, first + count - 1)
            next_q, next_k, next_v, next_factor, next_beta = _row(
                qkv, gates, following, head, ik, iv, in_k, in_v, V, REPEAT, DK, DV, C
            )
            state = state * factor
            read = tl.sum(state * k[:, None], 0)
            old = tl.sum(state * q[:, None], 0)
            delta = (v - read) * beta
            tl.store(
                out + row * (V * DV) + head * DV + iv, old + tl.sum(q * k, 0) * delta, mask=in_v
            )
            state = tl.fma(k[:, None], delta[None, :], state)
            if j == 0:
                tl.store(own_s, state, mask=both)
            else:
                kept = (slot * ROWS + j) * V + head
                tl.store(replay_delta + kept * DV + iv, delta, mask=in_v)
                if tl.program_id(2) == 0:
                    tl.store(replay_k + kept * DK + ik, k, mask=in_k)
                    tl.store(replay_factor + kept, factor)
            q, k, v, factor, beta = next_q, next_k, next_v, next_factor, next_beta


@triton.jit
def _row(
    qkv,
    gates,
    row,
    head,
    ik,
    iv,
    in_k,
    in_v,
    V: tl.constexpr,
    REPEAT: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
):
    """q, k [PK], v [BV], decay factor and beta of one row and value head."""
    KEYS: tl.constexpr = V // REPEAT * DK
    at = qkv + row * C + head // REPEAT * DK
    q = tl.load(at + ik, mask=in_k, other=0.0)
    k = tl.load(at + KEYS + ik, mask=in_k, other=0.0)
    v = tl.load(qkv + row * C + 2 * KEYS + head * DV + iv, mask=in_v, other=0.0)
    own = gates + (row * V + head) * 2
    return q, k, v, tl.load(own), tl.load(own + 1)


@triton.jit
def _gate(
    x,
    projected,
    norm,
    out,
    eps,
    V: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    SILU: tl.constexpr,
    BH: tl.constexpr,
    PV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, tiles of value heads): out bf16 [R, V*DV] = gated RMS norm of x fp32 [R, V*DV], head by head."""
    row = tl.program_id(0)
    head = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    i = tl.arange(0, PV)[None, :]
    inside = (i < DV) & (head < V)
    scale = tl.load(norm + i, mask=i < DV, other=0.0).to(tl.float32)
    at = row * (V * DV) + head * DV + i
    # Projected before `_heads`, or the scan of a prompt, gave what this kernel waits for.
    z = early(projected + row * (C + V * DV + 2 * V) + C + head * DV + i, inside, 0.0).to(
        tl.float32
    )
    gate = sigmoid(z)
    if SILU:
        gate = z * gate
    wait(OVERLAP)
    o = tl.load(x + at, mask=inside, other=0.0)
    root = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
    normed = (o * root[:, None]).to(tl.bfloat16).to(tl.float32)
    tl.store(out + at, (normed * scale).to(tl.bfloat16).to(tl.float32) * gate, mask=inside)


@triton.jit
def _replay(
    s,
    replay_k,
    replay_delta,
    replay_factor,
    kept,
    SLOTS: tl.constexpr,
    V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    PK: tl.constexpr,
    PV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (layers * slots, value heads): S over the kept rows after the first."""
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    ik = tl.arange(0, PK)
    iv = tl.arange(0, PV)
    wait(OVERLAP)
    count = tl.load(kept + place % SLOTS)
    if count > 1:
        both = (ik[:, None] < DK) & (iv[None, :] < DV)
        own = s + (place * V + head) * (DK * DV) + ik[:, None] * DV + iv[None, :]
        state = tl.load(own, mask=both, other=0.0)
        for j in range(1, count):
            at = (place * ROWS + j) * V + head
            k = tl.load(replay_k + at * DK + ik, mask=ik < DK, other=0.0)
            delta = tl.load(replay_delta + at * DV + iv, mask=iv < DV, other=0.0)
            # As in `_steps`: rounded after the decay, then one fused multiply and add.
            state = state * tl.load(replay_factor + at)
            state = tl.fma(k[:, None], delta[None, :], state)
        tl.store(own, state, mask=both)


@triton.jit
def _shift(
    buffer,
    kept,
    SLOTS: tl.constexpr,
    HISTORY: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PH: tl.constexpr,
    BC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (layers * slots, tiles of columns): the last HISTORY of history + kept rows become the history."""
    place = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    h = tl.arange(0, PH)
    wait(OVERLAP)
    count = tl.load(kept + place % SLOTS)
    if count > 0:
        own = buffer + place * ((HISTORY + ROWS) * C) + h[:, None] * C + c[None, :]
        inside = (h[:, None] < HISTORY) & (c[None, :] < C)
        rows = tl.load(own + count * C, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(own, rows, mask=inside)


@triton.jit
def _keep_streams(
    streams,
    pending,
    kept,
    firsts,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (slots * ROWS, tiles of columns): pending [slots, ROWS, W] of a slot's kept rows."""
    place = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    wait(OVERLAP)
    slot = place // ROWS
    row = place % ROWS
    if row < tl.load(kept + slot):
        source = streams + (tl.load(firsts + slot) + row).to(tl.int64) * W
        value = tl.load(source + c, mask=c < W)
        tl.store(pending + place.to(tl.int64) * W + c, value, mask=c < W)


@dataclass(frozen=True, slots=True)
class GdnScratch:
    """Buffers for up to `max_rows` rows, fp32: convolved heads [rows, C], gates [rows, V, 2], out [rows, V*dv]."""

    qkv: Tensor
    gates: Tensor
    out: Tensor

    @staticmethod
    def make(spec: GdnSpec, max_rows: int, device: torch.device) -> GdnScratch:
        """Buffers for one geometry."""
        return GdnScratch(
            qkv=torch.empty(max_rows, spec.conv_channels, device=device),
            gates=torch.empty(max_rows, spec.num_value_heads, 2, device=device),
            out=torch.empty(max_rows, spec.value_channels, device=device),
        )


def gdn_window(
    projected: Tensor,
    weights: GdnWeights,
    scratch: GdnScratch,
    layout: WindowLayout,
    state: SlotState,
    layer: int,
    spec: GdnSpec,
    eps: float,
    out: Tensor,
) -> None:
    """projected bf16 [R, C + V*dv + 2*V] -> out bf16 [R, V*dv], before the output projection.

    `layer` counts among the GDN layers. Advances S by each slot's first row; keeps convolution inputs and replay rows.
    """
    keys, values = spec.num_key_heads, spec.num_value_heads
    rows = state.replay_k.shape[2]
    pk, pv = triton.next_power_of_2(spec.key_dim), triton.next_power_of_2(spec.value_dim)
    convolve_heads(
        projected,
        weights,
        state.conv[layer],
        layout.row_slots,
        layout.starts,
        spec,
        scratch.qkv,
        scratch.gates,
        chunk=False,
    )
    tile = min(32, pv)
    _steps[(layout.num_places, values, triton.cdiv(spec.value_dim, tile))](
        scratch.qkv,
        scratch.gates,
        scratch.out,
        state.s[layer],
        state.replay_k[layer],
        state.replay_delta[layer],
        state.replay_factor[layer],
        layout.slots,
        layout.firsts,
        layout.counts,
        V=values,
        REPEAT=values // keys,
        DK=spec.key_dim,
        DV=spec.value_dim,
        C=spec.conv_channels,
        ROWS=rows,
        PK=pk,
        BV=tile,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(1, 1),
    )
    gate_heads(scratch.out, projected, weights, spec, eps, out)


def convolve_heads(
    projected: Tensor,
    weights: GdnWeights,
    history: Tensor,
    row_slots: Tensor,
    starts: Tensor,
    spec: GdnSpec,
    qkv: Tensor,
    gates: Tensor,
    *,
    chunk: bool,
) -> None:
    """projected [R, ...] -> qkv fp32 [R, C], gates fp32 [R, V, 2]; history [slots, width-1 + rows, C]. See `_heads`."""
    keys, values = spec.num_key_heads, spec.num_value_heads
    num_rows = projected.shape[0]
    tile = 16 if chunk else 1
    _heads[(triton.cdiv(num_rows, tile), 2 * keys + values)](
        projected,
        weights.conv,
        weights.decay,
        weights.dt_bias,
        history,
        qkv,
        gates,
        row_slots,
        starts,
        num_rows,
        K=keys,
        V=values,
        DK=spec.key_dim,
        DV=spec.value_dim,
        C=spec.conv_channels,
        WIDTH=spec.conv_width,
        ROWS=history.shape[1] - spec.conv_width + 1,
        CHUNK=chunk,
        BT=tile,
        P=triton.next_power_of_2(max(spec.key_dim, spec.value_dim)),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4 if chunk else 1, 1),
    )


def gate_heads(
    x: Tensor, projected: Tensor, weights: GdnWeights, spec: GdnSpec, eps: float, out: Tensor
) -> None:
    """x fp32 [R, V*dv] -> out bf16 [R, V*dv], normed per head and gated by z of `projected`."""
    num_rows = projected.shape[0]
    # A program per head while there are few rows, so that the chip is full; else it would only be full of starts.
    tile = 1 if num_rows <= GATE_ROWS else 16
    _gate[(num_rows, triton.cdiv(spec.num_value_heads, tile))](
        x,
        projected,
        weights.norm,
        out,
        eps,
        V=spec.num_value_heads,
        DV=spec.value_dim,
        C=spec.conv_channels,
        SILU=spec.gate == "silu",
        BH=tile,
        PV=triton.next_power_of_2(spec.value_dim),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(1 if tile == 1 else 4, 1),
    )


def commit_rows(state: SlotState, kept: Tensor, spec: GdnSpec) -> None:
    """Keep the first kept[slot] rows (int32 [slots]; 0 leaves a slot alone) of the last window, in all layers."""
    layers, slots = state.s.shape[:2]
    rows = state.replay_k.shape[2]
    if layers:
        _replay[(layers * slots, spec.num_value_heads)](
            state.s,
            state.replay_k,
            state.replay_delta,
            state.replay_factor,
            kept,
            SLOTS=slots,
            V=spec.num_value_heads,
            DK=spec.key_dim,
            DV=spec.value_dim,
            ROWS=rows,
            PK=triton.next_power_of_2(spec.key_dim),
            PV=triton.next_power_of_2(spec.value_dim),
            OVERLAP=LAUNCH.overlap,
            **LAUNCH.options(8, 1),
        )
        _shift_history(state.conv, state.conv_history, kept)
    if state.ple.shape[0]:
        _shift_history(state.ple, state.ple_history, kept)


def keep_streams(state: SlotState, streams: Tensor, kept: Tensor, firsts: Tensor) -> None:
    """state.pending of the kept rows from a window's streams [R, S*H]; firsts int32 [slots]: a slot's first row.

    Slots without kept rows are left alone: parked state may be on its way into them.
    """
    slots, rows, width = state.pending.shape
    if not slots:
        return
    tile = 1024
    _keep_streams[(slots * rows, triton.cdiv(width, tile))](
        streams,
        state.pending,
        kept,
        firsts,
        ROWS=rows,
        W=width,
        BC=tile,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )


def _shift_history(buffer: Tensor, history: int, kept: Tensor) -> None:
    layers, slots, total, columns = buffer.shape
    tile = 256
    _shift[(layers * slots, triton.cdiv(columns, tile))](
        buffer,
        kept,
        SLOTS=slots,
        HISTORY=history,
        ROWS=total - history,
        C=columns,
        PH=triton.next_power_of_2(history),
        BC=tile,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
