"""Gated DeltaNet for a window's rows and its commit (model.md 1.4; D4): one program per slot and value head holds S.

A window's kernel does all between the two projections: convolution, norms, gates, the recurrence over the slot's rows
and the gated norm of the output. It stores S after the first row and leaves what `commit` replays for the others.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.primitives import LAUNCH, begin, sigmoid, wait

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


@triton.jit
def _convolved(
    projected, history, conv, channel, inside, j,
    C: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
):
    """SiLU of the causal convolution at the slot's row j for some channels; rows before the first come from history."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        back = j + tap - (WIDTH - 1)
        old = tl.load(history + (back + WIDTH - 1) * C + channel, mask=inside & (back < 0), other=0.0)
        new = tl.load(projected + back * ROW + channel, mask=inside & (back >= 0), other=0.0)
        factor = tl.load(conv + tap * C + channel, mask=inside, other=0.0)
        total += (old.to(tl.float32) + new.to(tl.float32)) * factor.to(tl.float32)
    total = total.to(tl.bfloat16).to(tl.float32)
    return (total * sigmoid(total)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _unit(x, scale):
    """L2 norm (model.md 1.2) times scale."""
    return x * (tl.rsqrt(tl.sum(x * x, 0) + 1e-6) * scale)


@triton.jit
def _window(
    projected, conv, decay, dt_bias, norm, out,
    s, history, replay_k, replay_delta, replay_factor,
    slots, firsts, counts,
    eps,
    V: tl.constexpr, REPEAT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
    PK: tl.constexpr, PV: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Grid (places of the window, value heads)."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    ROW: tl.constexpr = C + V * DV + 2 * V
    KEYS: tl.constexpr = V // REPEAT * DK
    ik = tl.arange(0, PK)
    iv = tl.arange(0, PV)
    begin(OVERLAP)
    in_k = ik < DK
    in_v = iv < DV
    key_head = head // REPEAT
    g_decay = tl.load(decay + head)
    g_bias = tl.load(dt_bias + head)
    scale_v = tl.load(norm + iv, mask=in_v, other=0.0).to(tl.float32)
    wait(OVERLAP)
    count = tl.load(counts + place)
    if count > 0:
        slot = tl.load(slots + place).to(tl.int64)
        first = tl.load(firsts + place)
        own_s = s + (slot * V + head) * (DK * DV) + ik[:, None] * DV + iv[None, :]
        both = in_k[:, None] & in_v[None, :]
        state = tl.load(own_s, mask=both, other=0.0)
        rows = projected + first * ROW
        past = history + slot * ((WIDTH - 1 + ROWS) * C)
        cq = key_head * DK + ik
        ck = KEYS + cq
        cv = 2 * KEYS + head * DV + iv
        for j in range(count):
            q = _unit(_convolved(rows, past, conv, cq, in_k, j, C, ROW, WIDTH), DK ** -0.5)
            k = _unit(_convolved(rows, past, conv, ck, in_k, j, C, ROW, WIDTH), 1.0)
            v = _convolved(rows, past, conv, cv, in_v, j, C, ROW, WIDTH)
            row = rows + j * ROW
            b = tl.load(row + C + V * DV + head).to(tl.float32)
            a = tl.load(row + C + V * DV + V + head).to(tl.float32) + g_bias
            soft = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
            factor = tl.exp(soft * g_decay)
            state = state * factor
            read = tl.sum(state * k[:, None], 0)
            delta = (v - read) * sigmoid(b)
            o = tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * delta
            state += k[:, None] * delta[None, :]
            if j == 0:
                tl.store(own_s, state, mask=both)
            else:
                kept = (slot * ROWS + j) * V + head
                tl.store(replay_k + kept * DK + ik, k, mask=in_k)
                tl.store(replay_delta + kept * DV + iv, delta, mask=in_v)
                tl.store(replay_factor + kept, factor)
            z = tl.load(row + C + head * DV + iv, mask=in_v, other=0.0).to(tl.float32)
            gate = sigmoid(z)
            if SILU:
                gate = z * gate
            root = tl.rsqrt(tl.sum(o * o, 0) / DV + eps)
            normed = (o * root).to(tl.bfloat16).to(tl.float32)
            result = (normed * scale_v).to(tl.bfloat16).to(tl.float32) * gate
            tl.store(out + (first + j) * (V * DV) + head * DV + iv, result, mask=in_v)
            kept_row = past + (WIDTH - 1 + j) * C
            tl.store(kept_row + cv, tl.load(row + cv, mask=in_v, other=0.0), mask=in_v)
            if head % REPEAT == 0:
                tl.store(kept_row + cq, tl.load(row + cq, mask=in_k, other=0.0), mask=in_k)
                tl.store(kept_row + ck, tl.load(row + ck, mask=in_k, other=0.0), mask=in_k)


@triton.jit
def _replay(
    s, replay_k, replay_delta, replay_factor, kept,
    SLOTS: tl.constexpr, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    PK: tl.constexpr, PV: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Grid (layers * slots, value heads): S over the kept rows after the first."""
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    ik = tl.arange(0, PK)
    iv = tl.arange(0, PV)
    begin(OVERLAP)
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
            state = state * tl.load(replay_factor + at) + k[:, None] * delta[None, :]
        tl.store(own, state, mask=both)


@triton.jit
def _shift(
    buffer, kept,
    SLOTS: tl.constexpr, HISTORY: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    PH: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Grid (layers * slots, tiles of columns): the last HISTORY of history + kept rows become the history."""
    place = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    h = tl.arange(0, PH)
    begin(OVERLAP)
    wait(OVERLAP)
    count = tl.load(kept + place % SLOTS)
    if count > 0:
        own = buffer + place * ((HISTORY + ROWS) * C) + h[:, None] * C + c[None, :]
        inside = (h[:, None] < HISTORY) & (c[None, :] < C)
        rows = tl.load(own + count * C, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(own, rows, mask=inside)


def gdn_window(
    projected: Tensor,
    weights: GdnWeights,
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
    _window[(layout.num_places, spec.num_value_heads)](
        projected, weights.conv, weights.decay, weights.dt_bias, weights.norm, out,
        state.s[layer], state.conv[layer],
        state.replay_k[layer], state.replay_delta[layer], state.replay_factor[layer],
        layout.slots, layout.firsts, layout.counts,
        eps,
        V=spec.num_value_heads, REPEAT=spec.num_value_heads // spec.num_key_heads,
        DK=spec.key_dim, DV=spec.value_dim, C=spec.conv_channels, WIDTH=spec.conv_width,
        ROWS=state.replay_k.shape[2], SILU=spec.gate == "silu",
        PK=triton.next_power_of_2(spec.key_dim), PV=triton.next_power_of_2(spec.value_dim),
        OVERLAP=LAUNCH.overlap, **LAUNCH.options(8, 1),
    )


def commit_rows(state: SlotState, kept: Tensor, spec: GdnSpec) -> None:
    """Keep the first kept[slot] rows (int32 [slots]; 0 leaves a slot alone) of the last window, in all layers."""
    layers, slots = state.s.shape[:2]
    rows = state.replay_k.shape[2]
    if layers:
        _replay[(layers * slots, spec.num_value_heads)](
            state.s, state.replay_k, state.replay_delta, state.replay_factor, kept,
            SLOTS=slots, V=spec.num_value_heads, DK=spec.key_dim, DV=spec.value_dim, ROWS=rows,
            PK=triton.next_power_of_2(spec.key_dim), PV=triton.next_power_of_2(spec.value_dim),
            OVERLAP=LAUNCH.overlap, **LAUNCH.options(8, 1),
        )
        _shift_history(state.conv, state.conv_history, kept)
    if state.ple.shape[0]:
        _shift_history(state.ple, state.ple_history, kept)


def _shift_history(buffer: Tensor, history: int, kept: Tensor) -> None:
    layers, slots, total, columns = buffer.shape
    tile = 256
    _shift[(layers * slots, triton.cdiv(columns, tile))](
        buffer, kept,
        SLOTS=slots, HISTORY=history, ROWS=total - history, C=columns,
        PH=triton.next_power_of_2(history), BC=tile,
        OVERLAP=LAUNCH.overlap, **LAUNCH.options(4, 1),
    )
