"""Reading a prompt piece on a GPU: library products over all rows, and this package's kernels between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda.chunk_kernels import (
    DELTA_ROWS,
    attend_chunk,
    delta_rule,
    experts_into_streams,
    mix_streams,
)
from engine.cuda.gdn import GATE_ROWS, convolve_heads, gate_heads
from engine.cuda.moe import route_into
from engine.cuda.norm import norm_rows
from engine.cuda.ple import gather_rows
from engine.cuda.qsa import write_chunk_cells
from engine.cuda.tiers import StagedExperts
from engine.layers.residual import write_back

if TYPE_CHECKING:
    from engine.cuda.gdn import GdnWeights
    from engine.cuda.moe import MoeWeights
    from engine.cuda.ple import PleWeights
    from engine.cuda.qsa import QsaWeights
    from engine.cuda.residual import ResidualWeights
    from engine.cuda.weights import CudaLayer, CudaModel
    from engine.model_spec import ModelSpec
    from engine.ple_table import Fetched
    from engine.state import SlotState


def chunk_bytes(spec: ModelSpec, num_rows: int, max_context: int) -> int:
    """Most bytes that are alive together while a piece of so many rows is read where a context ends.

    Each sum counts the tensors of one block at its widest point; streams, mixed rows and ids live beside it. A stage
    may lack a kind of block.
    """
    gdn, qsa, moe, wide = spec.gdn, spec.qsa, spec.moe, spec.stream_width
    half, fp32, int64 = 2, 4, 8
    projected = gdn.conv_channels + gdn.value_channels + 2 * gdn.num_value_heads
    squares = gdn.num_value_heads * (2 * DELTA_ROWS + 1)
    queries = qsa.num_heads * qsa.head_dim
    indexed = (qsa.num_index_heads + 1) * qsa.index_dim
    num_blocks = max_context // qsa.block_tokens if max_context > qsa.dense_tokens else 0
    head = moe.num_experts + 1 + 2 * moe.shared_dim
    per_row = {
        "gdn": half * projected
        + fp32 * (gdn.conv_channels + 2 * gdn.num_value_heads + squares + gdn.value_channels),
        "qsa": half * (4 * queries + 2 * qsa.num_kv_heads * qsa.head_dim + 2 * indexed)
        + fp32 * (num_blocks + -(-num_blocks // 16)),
        "moe": half * (head + moe.shared_dim + spec.hidden)
        + moe.num_active * (half * (moe.expert_dim + spec.hidden) + 4 * int64),
        "residual": half * (2 * wide + 2 * spec.mix_rank + spec.hidden),
        "ple": 20 * wide + half * (spec.hidden + spec.ple.embed_dim) if spec.ple else 0,
        "draft layer": half * 4 * wide if spec.num_draft_layers else 0,
    }
    beside = half * (wide + 2 * spec.hidden) + int64 * (spec.ple.ngram_size if spec.ple else 1)
    absent = {"gdn": not spec.gdn_layers, "qsa": not spec.qsa_layers}
    return num_rows * (beside + max(n for name, n in per_row.items() if not absent.get(name)))


class Prefill:
    """Reads pieces of one slot at a time into a SlotState. Holds no state of its own but what it stages experts in.

    routed: rows that chose each expert, int64 [layers, E], counted on where there is one.
    """

    def __init__(self, model: CudaModel, state: SlotState) -> None:
        self._model = model
        self._spec = model.spec
        self._state = state
        has_far = any(x.moe.far is not None and x.moe.far.count for x in model.layers)
        self.staged = StagedExperts.make(model.spec, state.device) if has_far else None
        self.routed: Tensor | None = None

    def prepare(self) -> None:
        """Compile every kernel for pieces of one row and of many, but for those that select blocks.

        Spoils slot 0. The rest is compiled by a piece at the end of the context.
        """
        context = self._spec.ple.ngram_size if self._spec.ple else 1
        for num_rows in (1, GATE_ROWS + 1):
            ids = torch.zeros(num_rows, context, dtype=torch.int64)
            streams = self.chunk(ids, 0, 0, self._quiet_streams(num_rows))
            if self._model.draft is not None:
                self.draft_cells(ids[:, -1].to(self._state.device), streams, 0, 0)
            if self._spec.is_last:
                self.logits(streams[-1:])

    def _quiet_streams(self, num_rows: int) -> Tensor | None:
        """What a stage before this one might send."""
        if self._spec.is_first:
            return None
        shape = (num_rows, self._spec.stream_width)
        return torch.zeros(shape, dtype=torch.bfloat16, device=self._state.device)

    def chunk(self, ids: Tensor, slot: int, start: int, streams: Tensor | None = None) -> Tensor:
        """ids int64 [T, context + 1], on the host, at positions [start, start + T) -> streams bf16 [T, S*H].

        streams: those of the stage before this one, if there is one; else the ids are embedded.
        """
        fetched = {table.index: table.fetch(ids) for table in self._model.tables}
        ids = ids.to(self._state.device, non_blocking=True)
        # A library operation comes first either way: it waits for other streams' events, for copies of parked state and
        # for what another stage sends. A kernel that starts before its predecessor ends might not.
        if streams is None:
            streams = self._embed(ids[:, -1]).repeat(1, self._spec.num_streams)
        else:
            streams = streams.clone()
        where = self._rows(slot, start, ids.shape[0])
        for number, layer in enumerate(self._model.layers):
            if layer.ple is not None:
                self._ple(streams, ids, layer.ple, slot, fetched.get(layer.ple.index))
            mixed, inject = self._read(streams, layer.mixer_residual)
            write_back(streams, inject, self._mixer(mixed, layer, slot, start, where))
            mixed, inject = self._read(streams, layer.moe_residual)
            counts = self._moe(mixed, layer.moe, streams, inject)
            if self.routed is not None:
                self.routed[number].add_(counts)
        return streams

    def _embed(self, ids: Tensor) -> Tensor:
        assert self._model.embedding is not None
        return self._model.embedding.index_select(0, ids)

    def logits(self, streams: Tensor) -> Tensor:
        """Streams [T, S*H] -> fp32 logits [T, vocab]."""
        assert self._model.final is not None
        assert self._model.head is not None
        mixed, _ = self._read(streams, self._model.final)
        return F.linear(mixed, self._model.head).to(torch.float32)

    def draft_cells(self, ids: Tensor, streams: Tensor, slot: int, start: int) -> None:
        """The draft layer's cells [start, start + T): ids int64 [T] at the next positions, streams [T, S*H]."""
        spec, layer = self._spec, self._model.draft
        assert layer is not None
        embedded = norm_rows(self._embed(ids), layer.norm_embedding, spec.norm_eps)
        hidden = norm_rows(streams, layer.norm_hidden, spec.norm_eps).view(-1, spec.hidden)
        combined = F.linear(hidden, layer.fc_hidden).view(-1, spec.num_streams, spec.hidden)
        combined = (combined + F.linear(embedded, layer.fc_embedding).unsqueeze(1)).flatten(1)
        mixed, _ = self._read(combined, layer.attention_residual)
        self._project(mixed, layer.attention, self._rows(slot, start, ids.shape[0]))

    def _rows(self, slot: int, start: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slot, position and first flat row of each row, int32 [T]."""
        device = self._state.device
        slots = torch.full((count,), slot, dtype=torch.int32, device=device)
        positions = torch.arange(start, start + count, dtype=torch.int32, device=device)
        return slots, positions, torch.zeros_like(slots)

    def _read(self, streams: Tensor, weights: ResidualWeights) -> tuple[Tensor, Tensor]:
        normed = norm_rows(streams, None, weights.eps, weights.num_streams)
        down = F.linear(normed, weights.down)
        up = F.linear(F.silu(down[:, : weights.rank]), weights.up)
        return mix_streams(up, normed, weights.scale, weights.num_streams), down[
            :, weights.rank : weights.rank + weights.num_streams
        ].tanh().add_(1.0)

    def _mixer(
        self,
        mixed: Tensor,
        layer: CudaLayer,
        slot: int,
        start: int,
        where: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        if layer.gdn is not None:
            return self._gdn(mixed, layer.gdn, layer.gdn_index, slot, where)
        assert layer.qsa is not None
        projected, q, index_q = self._project(mixed, layer.qsa, where)
        out = attend_chunk(
            projected, layer.qsa, q, index_q, where[1], slot, start, self._state, self._spec.qsa
        )
        return F.linear(out, layer.qsa.out_proj)

    def _gdn(
        self,
        mixed: Tensor,
        weights: GdnWeights,
        index: int,
        slot: int,
        where: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        spec, gdn, state = self._spec, self._spec.gdn, self._state
        projected = F.linear(mixed, weights.in_proj)
        num_rows = mixed.shape[0]
        qkv = torch.empty(num_rows, gdn.conv_channels, device=mixed.device)
        gates = torch.empty(num_rows, gdn.num_value_heads, 2, device=mixed.device)
        convolve_heads(
            projected, weights, state.conv[index], where[0], where[2], gdn, qkv, gates, chunk=True
        )
        history = state.conv[index, slot, : state.conv_history]
        history.copy_(
            torch.cat((history, projected[-state.conv_history :, : gdn.conv_channels]))[
                -state.conv_history :
            ]
        )
        out = delta_rule(qkv, gates, state.s[index, slot], gdn.num_key_heads)
        gated = mixed.new_empty(num_rows, gdn.value_channels)
        gate_heads(out, projected, weights, gdn, spec.norm_eps, gated)
        return F.linear(gated, weights.out_proj)

    def _project(
        self, mixed: Tensor, weights: QsaWeights, where: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        model, qsa = self._model, self._spec.qsa
        projected = F.linear(mixed, weights.in_proj)
        q = mixed.new_empty(mixed.shape[0], qsa.num_heads, qsa.head_dim)
        index_q = mixed.new_empty(mixed.shape[0], qsa.num_index_heads, qsa.index_dim)
        write_chunk_cells(
            projected,
            weights,
            q,
            index_q,
            model.cos,
            model.sin,
            *where,
            self._state,
            qsa,
            self._spec.norm_eps,
        )
        return projected, q, index_q

    def _moe(self, mixed: Tensor, weights: MoeWeights, streams: Tensor, inject: Tensor) -> Tensor:
        """Into the streams. Returns how many rows chose each expert."""
        moe = self._spec.moe
        num_rows = mixed.shape[0]
        head = F.linear(mixed, weights.head)
        top = torch.empty(num_rows, moe.num_active, device=mixed.device)
        ids = torch.empty(num_rows, moe.num_active, dtype=torch.int32, device=mixed.device)
        middle = mixed.new_empty(num_rows, moe.shared_dim)
        route_into(head, top, ids, middle, moe)
        shared = F.linear(middle, weights.shared_down)
        return experts_into_streams(
            mixed, head, weights, top, ids, shared, streams, inject, moe, self.staged
        )

    def _ple(
        self,
        streams: Tensor,
        ids: Tensor,
        weights: PleWeights,
        slot: int,
        fetched: Fetched | None,
    ) -> None:
        """streams += the injection, in place; advances the slot's convolution history.

        fetched: the rows of a table that lies on the disk.
        """
        spec, ple, state = self._spec, self._spec.ple, self._state
        assert ple is not None
        embedded = streams.new_empty(ids.shape[0], ple.embed_dim)
        if fetched is None:
            gather_rows(ids, weights, ple, embedded)
        else:
            embedded.copy_(fetched().view(embedded.shape), non_blocking=True)
        parts = F.linear(embedded, weights.key_value)
        key, value = parts.split([streams.shape[1], spec.hidden], dim=-1)
        groups = spec.num_streams
        key = norm_rows(key.contiguous(), weights.norm_key, spec.norm_eps, groups).unflatten(
            -1, (groups, -1)
        )
        query = norm_rows(streams, weights.norm_query, spec.norm_eps, groups).unflatten(
            -1, (groups, -1)
        )
        dot = (
            (key.to(torch.float32) * query.to(torch.float32))
            .sum(-1, keepdim=True)
            .mul_(spec.hidden**-0.5)
        )
        gate = torch.sigmoid(dot.abs().clamp_min_(1e-6).sqrt_().mul_(dot.sign()))
        gated = (gate * value.unsqueeze(-2)).to(streams.dtype).flatten(-2)
        normed = norm_rows(gated, weights.norm_conv, spec.norm_eps, groups)
        history = state.ple[weights.index, slot, : state.ple_history]
        padded = torch.cat((history, normed))
        history.copy_(padded[-state.ple_history :])
        num_rows = streams.shape[0]
        total = torch.zeros(streams.shape, device=streams.device)
        for tap in range(ple.conv_width):
            total.addcmul_(
                padded[tap * ple.ngram_size :][:num_rows].to(torch.float32),
                weights.conv[tap].to(torch.float32),
            )
        streams.add_(gated.add_(F.silu(total.to(streams.dtype))))
