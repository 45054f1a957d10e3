"""Hashed n-gram embedding for a window's rows (model.md 1.7). The table may lie in pinned host memory."""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import LAUNCH, sigmoid, wait
from engine.cuda.products import ProductScratch, product

if TYPE_CHECKING:
    from engine.cuda.layout import WindowLayout
    from engine.layers.ple import HashedRows
    from engine.model_spec import PleSpec
    from engine.state import SlotState


@dataclass(frozen=True, slots=True)
class PleWeights:
    """table bf16 [rows, head dim], None if `rows` reads it from the disk; key_value bf16 [S*H + H, embed dim];
    norms fp32 (1 + w) [S*H]; conv bf16 [width, S*H];
    multipliers int64 [ngram_size]; sizes, offsets int64 [heads]."""

    index: int
    table: Tensor | None
    rows: HashedRows | None
    key_value: Tensor
    norm_key: Tensor
    norm_query: Tensor
    norm_conv: Tensor
    conv: Tensor
    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all but the table."""
        parts = (self.key_value, self.norm_key, self.norm_query, self.norm_conv, self.conv)
        return sum(t.numel() * t.element_size() for t in parts)


@dataclass(frozen=True, slots=True)
class PleScratch:
    """Buffers for up to `max_rows` rows. embedded: of each PLE layer, as rows from the disk come before a window."""

    embedded: Tensor
    key_value: Tensor
    gated: Tensor

    @staticmethod
    def make(
        spec: PleSpec, hidden: int, num_streams: int, max_rows: int, device: torch.device
    ) -> PleScratch:
        """Buffers for one geometry."""

        def empty(width: int) -> Tensor:
            return torch.empty(max_rows, width, dtype=torch.bfloat16, device=device)

        wide = hidden * num_streams
        return PleScratch(
            embedded=torch.empty(
                len(spec.layer_ids), max_rows, spec.embed_dim, dtype=torch.bfloat16, device=device
            ),
            key_value=empty(wide + hidden),
            gated=empty(wide),
        )


@triton.jit
def _gather(
    ids,
    table,
    multipliers,
    sizes,
    offsets,
    out,
    eos,
    CONTEXT: tl.constexpr,
    PER_NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, heads): out [R, HEADS*D]. ids int64 [R, CONTEXT + 1], oldest first."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, PD)
    wait(OVERLAP)
    own = ids + row * (CONTEXT + 1)
    order = head // PER_NGRAM + 1
    mixed = tl.load(own + CONTEXT) * tl.load(multipliers)
    hidden = 0
    for back in tl.static_range(1, CONTEXT + 1):
        earlier = tl.load(own + CONTEXT - back)
        hidden = hidden | (earlier == eos).to(tl.int32)
        earlier = tl.where(hidden > 0, eos, earlier)
        mixed = tl.where(back <= order, mixed ^ (earlier * tl.load(multipliers + back)), mixed)
    at = mixed % tl.load(sizes + head) + tl.load(offsets + head)
    value = tl.load(table + at * D + d, mask=d < D, other=0.0)
    tl.store(out + (row * HEADS + head) * D + d, value, mask=d < D)


@triton.jit
def _gate(
    streams,
    key_value,
    norm_key,
    norm_query,
    norm_conv,
    gated,
    buffer,
    row_slots,
    starts,
    eps,
    H: tl.constexpr,
    S: tl.constexpr,
    HISTORY: tl.constexpr,
    ROWS: tl.constexpr,
    PH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, S): the gated value, and its norm behind the slot's convolution history."""
    row = tl.program_id(0)
    s = tl.program_id(1)
    h = tl.arange(0, PH)
    wait(OVERLAP)
    inside = h < H
    at = s * H + h
    key = tl.load(key_value + row * ((S + 1) * H) + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(key_value + row * ((S + 1) * H) + S * H + h, mask=inside, other=0.0).to(
        tl.float32
    )
    query = tl.load(streams + row * (S * H) + at, mask=inside, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, 0) / H + eps) * tl.load(norm_key + at, mask=inside, other=0.0)
    query *= tl.rsqrt(tl.sum(query * query, 0) / H + eps) * tl.load(
        norm_query + at, mask=inside, other=0.0
    )
    dot = tl.sum(
        key.to(tl.bfloat16).to(tl.float32) * query.to(tl.bfloat16).to(tl.float32), 0
    ) / tl.sqrt(H * 1.0)
    size = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    result = sigmoid(tl.where(dot > 0, size, tl.where(dot < 0, -size, 0.0))) * value
    tl.store(gated + row * (S * H) + at, result, mask=inside)
    result = result.to(tl.bfloat16).to(tl.float32)
    normed = result * tl.rsqrt(tl.sum(result * result, 0) / H + eps)
    normed *= tl.load(norm_conv + at, mask=inside, other=0.0)
    slot = tl.load(row_slots + row).to(tl.int64)
    place = HISTORY + row - tl.load(starts + row)
    tl.store(buffer + (slot * (HISTORY + ROWS) + place) * (S * H) + at, normed, mask=inside)


@triton.jit
def _convolve(
    gated,
    buffer,
    conv,
    streams,
    row_slots,
    starts,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    DILATION: tl.constexpr,
    HISTORY: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, tiles of columns): streams += gated + SiLU(convolution)."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    wait(OVERLAP)
    inside = c < W
    slot = tl.load(row_slots + row).to(tl.int64)
    place = row - tl.load(starts + row)
    own = buffer + (slot * (HISTORY + ROWS) + place) * W + c
    total = tl.zeros([BC], tl.float32)
    for tap in tl.static_range(WIDTH):
        value = tl.load(own + tap * DILATION * W, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(conv + tap * W + c, mask=inside, other=0.0).to(tl.float32)
    total = total.to(tl.bfloat16).to(tl.float32)
    added = tl.load(gated + row * W + c, mask=inside, other=0.0).to(tl.float32)
    added = (
        (added + (total * sigmoid(total)).to(tl.bfloat16).to(tl.float32))
        .to(tl.bfloat16)
        .to(tl.float32)
    )
    at = streams + row * W + c
    tl.store(at, tl.load(at, mask=inside, other=0.0).to(tl.float32) + added, mask=inside)


def gather_rows(ids: Tensor, weights: PleWeights, spec: PleSpec, out: Tensor) -> None:
    """ids int64 [T, context + 1] -> rows of a table in memory, bf16 [T, heads * head dim]."""
    _gather[(ids.shape[0], spec.num_heads)](
        ids,
        weights.table,
        weights.multipliers,
        weights.sizes,
        weights.offsets,
        out,
        spec.eos_id,
        CONTEXT=spec.ngram_size - 1,
        PER_NGRAM=spec.heads_per_ngram,
        HEADS=spec.num_heads,
        D=spec.head_dim,
        PD=triton.next_power_of_2(spec.head_dim),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(1, 1),
    )


def ple_into_streams(
    streams: Tensor,
    ids: Tensor,
    weights: PleWeights,
    scratch: PleScratch,
    layout: WindowLayout,
    state: SlotState,
    spec: PleSpec,
    num_streams: int,
    eps: float,
    products: ProductScratch,
) -> None:
    """streams bf16 [R, S*H] += the injection, in place; ids int64 [R, context + 1]. Keeps convolution inputs.

    Rows of a table on the disk are in `scratch.embedded` already.
    """
    num_rows, wide = streams.shape
    hidden = wide // num_streams
    embedded = scratch.embedded[weights.index, :num_rows]
    if weights.table is not None:
        gather_rows(ids, weights, spec, embedded)
    key_value = product(embedded, weights.key_value, scratch.key_value[:num_rows], products)
    buffer = state.ple[weights.index]
    history = state.ple_history
    rows = buffer.shape[1] - history
    _gate[(num_rows, num_streams)](
        streams,
        key_value,
        weights.norm_key,
        weights.norm_query,
        weights.norm_conv,
        scratch.gated,
        buffer,
        layout.row_slots,
        layout.starts,
        eps,
        H=hidden,
        S=num_streams,
        HISTORY=history,
        ROWS=rows,
        PH=triton.next_power_of_2(hidden),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(8, 1),
    )
    _convolve[(num_rows, triton.cdiv(wide, 1024))](
        scratch.gated,
        buffer,
        weights.conv,
        streams,
        layout.row_slots,
        layout.starts,
        W=wide,
        WIDTH=spec.conv_width,
        DILATION=spec.ngram_size,
        HISTORY=history,
        ROWS=rows,
        BC=1024,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
