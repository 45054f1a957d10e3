"""CudaStep: the decode step on a GPU. Owns the buffers of a window, runs its kernels, and replays them as graphs.

A graph is captured per number of rows; which slots the rows belong to, and where they stand, it reads from device
tensors. Trunk and draft layer of one model share one CudaStep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.cuda.gdn import GdnScratch, commit_rows, gdn_window
from engine.cuda.layout import MAX_ROWS, WindowLayout
from engine.cuda.moe import MoeScratch, moe_into_streams
from engine.cuda.norm import norm_rows
from engine.cuda.picks import PickInputs, pick
from engine.cuda.ple import PleScratch, ple_into_streams
from engine.cuda.products import ProductScratch, product, product_into_streams
from engine.cuda.qsa import QsaScratch, attend, write_cells
from engine.cuda.residual import ResidualScratch, read_streams
from engine.interface import MAX_SLOTS, MAX_SPEC
from engine.state import WINDOW_ROWS

if TYPE_CHECKING:
    from engine.cuda.qsa import QsaWeights
    from engine.cuda.residual import ResidualWeights
    from engine.cuda.weights import CudaDraftLayer, CudaModel
    from engine.model_spec import ModelSpec
    from engine.state import SlotState


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Everything a window of up to MAX_ROWS rows writes between two kernels."""

    ids: Tensor
    streams: Tensor
    mixed: Tensor
    inject: Tensor
    projected: Tensor
    middle: Tensor
    logits: Tensor
    products: ProductScratch
    residual: ResidualScratch
    gdn: GdnScratch
    qsa: QsaScratch
    moe: MoeScratch
    ple: PleScratch | None


def _make_buffers(spec: ModelSpec, capacity: int, device: torch.device) -> _Buffers:
    def empty(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(MAX_ROWS, width, dtype=dtype, device=device)

    gdn, qsa = spec.gdn, spec.qsa
    gdn_rows = gdn.conv_channels + gdn.value_channels + 2 * gdn.num_value_heads
    context = spec.ple.ngram_size if spec.ple else 1
    return _Buffers(
        ids=torch.zeros(MAX_ROWS * context, dtype=torch.int64, device=device),
        streams=empty(spec.stream_width),
        mixed=empty(spec.hidden),
        inject=empty(spec.num_streams),
        projected=torch.empty(
            MAX_ROWS * max(gdn_rows, _qsa_rows(spec)), dtype=torch.bfloat16, device=device
        ),
        middle=torch.empty(
            MAX_ROWS * max(gdn.value_channels, qsa.num_heads * qsa.head_dim),
            dtype=torch.bfloat16,
            device=device,
        ),
        logits=empty(spec.vocab_size, torch.float32),
        products=ProductScratch.make(device),
        residual=ResidualScratch.make(
            spec.hidden, spec.num_streams, spec.mix_rank, MAX_ROWS, device
        ),
        gdn=GdnScratch.make(gdn, MAX_ROWS, device),
        qsa=QsaScratch.make(qsa, capacity, MAX_ROWS, device),
        moe=MoeScratch.make(spec.moe, spec.hidden, MAX_ROWS, device),
        ple=PleScratch.make(spec.ple, spec.hidden, spec.num_streams, MAX_ROWS, device)
        if spec.ple
        else None,
    )


def _qsa_rows(spec: ModelSpec) -> int:
    qsa = spec.qsa
    heads = 2 * qsa.num_heads + 2 * qsa.num_kv_heads
    return heads * qsa.head_dim + (qsa.num_index_heads + 1) * qsa.index_dim


class Graphs:
    """Captured work by key. Without `enabled`, work runs as it is called."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(self, key: object, work: Callable[[], object]) -> None:
        """Run `work`, from its graph if there is one. `work` reads and writes fixed tensors only."""
        if not self._enabled:
            work()
            return
        if key not in self._graphs:
            # The first run compiles kernels, which no capture may contain.
            work()
            torch.cuda.synchronize()
            self._graphs[key] = self._capture(work)
            return
        self._graphs[key].replay()

    def _capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Threads that copy parked state may go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = graph.pool()
        return graph


class CudaStep:
    """Window, commit and draft chain of one model over one SlotState. One thread calls it."""

    def __init__(self, model: CudaModel, state: SlotState, *, graphs: bool = True) -> None:
        self.model = model
        self.state = state
        self.layout = WindowLayout(state.device)
        self.draft_layout = WindowLayout(state.device)
        self.buffers = _make_buffers(model.spec, state.capacity, state.device)
        self._draft = _DraftBuffers.make(model.spec, state) if model.draft is not None else None
        self._graphs = Graphs(enabled=graphs)
        self._kept = torch.zeros(state.s.shape[1], dtype=torch.int32, device=state.device)

    def prepare(self) -> None:
        """Compile and capture every size of window and the commit. Spoils all slots: call it before any is seated."""
        context = self.model.spec.ple.ngram_size if self.model.spec.ple else 1
        num_slots = self._kept.shape[0]
        for num_rows in range(1, num_slots * WINDOW_ROWS + 1):
            whole, rest = divmod(num_rows, WINDOW_ROWS)
            counts = [WINDOW_ROWS] * whole + [rest] * (rest > 0)
            ids = torch.zeros(num_rows, context, dtype=torch.int64, device=self.state.device)
            self.window(ids, range(len(counts)), counts, [0] * len(counts))
        self.commit({})

    # Windows

    def window(
        self, ids: Tensor, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int]
    ) -> Tensor:
        """One verify window; ids int64 [R, context + 1], each row's id last. Nothing is committed.

        Returns the streams after the last layer, bf16 [R, S*H]: valid until the next window. `logits` has the logits.
        """
        num_rows = ids.shape[0]
        self.layout.fill(slots, counts, starts)
        self.buffers.ids[: ids.numel()].copy_(ids.flatten())
        self._graphs.run(("window", num_rows), lambda: self._window(num_rows))
        return self.buffers.streams[:num_rows]

    def replay_window(self, num_rows: int) -> None:
        """Run the last window's graph again on the same inputs, for measuring: S moves on once more."""
        self._graphs.run(("window", num_rows), lambda: self._window(num_rows))

    def logits(self, num_rows: int) -> Tensor:
        """fp32 logits [R, vocab] of the last window: valid until the next."""
        return self.buffers.logits[:num_rows]

    def owns(self, streams: Tensor) -> bool:
        """Whether these are the last window's streams."""
        return streams.data_ptr() == self.buffers.streams.data_ptr()

    def commit(self, kept: dict[int, int]) -> None:
        """Keep the first rows of each slot's last window."""
        counts = [kept.get(slot, 0) for slot in range(self._kept.shape[0])]
        self._kept.copy_(torch.tensor(counts, dtype=torch.int32))
        self._graphs.run("commit", self._commit)

    def _commit(self) -> None:
        commit_rows(self.state, self._kept, self.model.spec.gdn)

    def _window(self, num_rows: int) -> None:
        model, spec, b = self.model, self.model.spec, self.buffers
        context = spec.ple.ngram_size if spec.ple else 1
        ids = b.ids[: num_rows * context].view(num_rows, context)
        streams = b.streams[:num_rows]
        streams.copy_(model.embedding.index_select(0, ids[:, -1]).repeat(1, spec.num_streams))
        for layer in model.layers:
            if layer.ple is not None:
                assert spec.ple is not None
                assert b.ple is not None
                ple_into_streams(
                    streams,
                    ids,
                    layer.ple,
                    b.ple,
                    self.layout,
                    self.state,
                    spec.ple,
                    spec.num_streams,
                    spec.norm_eps,
                    b.products,
                )
            if layer.gdn is not None:
                mixed, inject = self.read(streams, layer.mixer_residual)
                projected = product(
                    mixed,
                    layer.gdn.in_proj,
                    self.projected(num_rows, layer.gdn.in_proj),
                    b.products,
                )
                middle = self.middle(num_rows, spec.gdn.value_channels)
                gdn_window(
                    projected,
                    layer.gdn,
                    b.gdn,
                    self.layout,
                    self.state,
                    layer.gdn_index,
                    spec.gdn,
                    spec.norm_eps,
                    middle,
                )
                product_into_streams(middle, layer.gdn.out_proj, streams, inject, b.products)
            else:
                assert layer.qsa is not None
                mixed, inject = self.read(streams, layer.mixer_residual)
                self._attention(mixed, layer.qsa, streams, inject)
            mixed, inject = self.read(streams, layer.moe_residual)
            moe_into_streams(mixed, layer.moe, b.moe, streams, inject, spec.moe, b.products)
        self._head(streams, model.final, b.logits[:num_rows])

    def read(self, streams: Tensor, weights: ResidualWeights) -> tuple[Tensor, Tensor]:
        """The mixed row and injection weights."""
        num_rows = streams.shape[0]
        mixed, inject = self.buffers.mixed[:num_rows], self.buffers.inject[:num_rows]
        read_streams(
            streams, weights, self.buffers.residual, mixed, inject if weights.has_inject else None
        )
        return mixed, inject

    def projected(self, num_rows: int, weight: Tensor) -> Tensor:
        width = weight.shape[0]
        return self.buffers.projected[: num_rows * width].view(num_rows, width)

    def middle(self, num_rows: int, width: int) -> Tensor:
        return self.buffers.middle[: num_rows * width].view(num_rows, width)

    def _head(self, streams: Tensor, final: ResidualWeights, logits: Tensor) -> None:
        mixed, _ = self.read(streams, final)
        product(mixed, self.model.head, logits, self.buffers.products)

    def _attention(
        self, mixed: Tensor, weights: QsaWeights, streams: Tensor, inject: Tensor
    ) -> None:
        spec, layout, b = self.model.spec, self.layout, self.buffers
        num_rows = mixed.shape[0]
        projected = self.projected(num_rows, weights.in_proj)
        product(mixed, weights.in_proj, projected, b.products)
        self.write_cells(projected, weights, layout, num_rows)
        middle = self.middle(num_rows, spec.qsa.num_heads * spec.qsa.head_dim)
        attend(
            projected,
            weights,
            b.qsa,
            layout.row_slots,
            layout.positions,
            self.state,
            spec.qsa,
            middle,
        )
        product_into_streams(middle, weights.out_proj, streams, inject, b.products)

    def write_cells(
        self, projected: Tensor, weights: QsaWeights, layout: WindowLayout, num_rows: int
    ) -> None:
        model, spec = self.model, self.model.spec
        write_cells(
            projected,
            weights,
            self.buffers.qsa,
            model.cos,
            model.sin,
            layout.row_slots,
            layout.positions,
            layout.starts,
            self.state,
            spec.qsa,
            spec.norm_eps,
        )

    # Drafts

    def read_rows(
        self,
        ids: Tensor,
        streams: Tensor,
        slots: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        """Write the draft layer's cells of R rows: ids int64 [R] at the next positions, streams bf16 [R, S*H]."""
        num_rows = self._fill_draft(ids, streams, slots, counts, starts)
        self._graphs.run(("cells", num_rows), lambda: self._draft_cells(num_rows))

    def draft(
        self,
        ids: Tensor,
        streams: Tensor,
        slots: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """As `read_rows`, and fp32 logits [B, vocab] and streams bf16 [B, S*H] of each slot's last row.

        Both are valid until the next call.
        """
        d = self._drafting
        num_rows = self._fill_draft(ids, streams, slots, counts, starts)
        self._graphs.run(("draft", num_rows), lambda: self._draft_first(num_rows))
        return d.logits[: len(slots)], d.streams[: len(slots)]

    def chain(
        self,
        ids: Tensor,
        streams: Tensor,
        slots: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        picks: ChainPicks,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draft picks.num_steps tokens per slot without the host in between: ids and probabilities [steps][B].

        Every step is run for every slot; the caller cuts each chain where its gate says.
        """
        d = self._drafting
        num_rows = self._fill_draft(ids, streams, slots, counts, starts)
        d.set_picks(picks)
        truncated, limit = picks.truncated, picks.num_token_ids
        key = (num_rows, truncated, limit)
        self._graphs.run(("chain", *key), lambda: self._chain_first(num_rows, limit, truncated))
        for step in range(1, picks.num_steps):
            key = (step, truncated, limit)
            self._graphs.run(("next", *key), lambda j=step: self._chain_next(j, limit, truncated))
        found = torch.cat((d.picks.to(torch.float64), d.probabilities.to(torch.float64))).tolist()
        steps, used = picks.num_steps, len(slots)
        chosen = [[int(value) for value in row[:used]] for row in found[:steps]]
        return chosen, [row[:used] for row in found[MAX_SPEC : MAX_SPEC + steps]]

    @property
    def _drafting(self) -> _DraftBuffers:
        assert self._draft is not None
        return self._draft

    @property
    def _draft_layer(self) -> CudaDraftLayer:
        assert self.model.draft is not None
        return self.model.draft

    def _fill_draft(
        self,
        ids: Tensor,
        streams: Tensor,
        slots: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
    ) -> int:
        d = self._drafting
        num_rows = ids.shape[0]
        self.draft_layout.fill(slots, counts, starts)
        d.ids[:num_rows].copy_(ids)
        d.input[:num_rows].copy_(streams)
        return num_rows

    def _draft_cells(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the rows' cells; returns the layer's input streams, its projection and injection weights."""
        d, layer, layout = self._drafting, self._draft_layer, self.draft_layout
        combined = d.combined[:num_rows]
        self._combine(d.ids[:num_rows], d.input[:num_rows], combined)
        return self._draft_project(
            combined, layer.attention, layout.row_slots, layout.positions, layout.starts
        )

    def _draft_project(
        self,
        combined: Tensor,
        weights: QsaWeights,
        row_slots: Tensor,
        positions: Tensor,
        starts: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        model, spec = self.model, self.model.spec
        mixed, inject = self.read(combined, self._draft_layer.attention_residual)
        projected = product(
            mixed,
            weights.in_proj,
            self.projected(combined.shape[0], weights.in_proj),
            self.buffers.products,
        )
        write_cells(
            projected,
            weights,
            self.buffers.qsa,
            model.cos,
            model.sin,
            row_slots,
            positions,
            starts,
            self.state,
            spec.qsa,
            spec.norm_eps,
        )
        return combined, projected, inject

    def _combine(self, ids: Tensor, streams: Tensor, out: Tensor) -> None:
        """The layer's input streams: every stream projected, plus the embedded id."""
        spec, layer = self.model.spec, self._draft_layer
        embedded = norm_rows(
            self.model.embedding.index_select(0, ids), layer.norm_embedding, spec.norm_eps
        )
        embedded = product(
            embedded, layer.fc_embedding, torch.empty_like(embedded), self.buffers.products
        )
        hidden = norm_rows(streams, layer.norm_hidden, spec.norm_eps).view(-1, spec.hidden)
        product(hidden, layer.fc_hidden, out.view(-1, spec.hidden), self.buffers.products)
        out.view(-1, spec.num_streams, spec.hidden).add_(embedded.unsqueeze(1))

    def _draft_first(self, num_rows: int) -> None:
        d, layout, qsa = self._drafting, self.draft_layout, self.buffers.qsa
        combined, projected, inject = self._draft_cells(num_rows)
        last = layout.lasts
        places = layout.num_places
        d.streams.copy_(combined.index_select(0, last))
        d.row_slots.copy_(layout.row_slots.index_select(0, last))
        d.positions.copy_(layout.positions.index_select(0, last))
        qsa.q[:places].copy_(qsa.q.index_select(0, last))
        qsa.index_q[:places].copy_(qsa.index_q.index_select(0, last))
        self._draft_rest(projected.index_select(0, last), inject.index_select(0, last))

    def _draft_rest(self, projected: Tensor, inject: Tensor) -> None:
        """From the last rows' projection to their logits; d.streams becomes the layer's output streams."""
        d, layer, spec = self._drafting, self._draft_layer, self.model.spec
        places = projected.shape[0]
        middle = self.middle(places, spec.qsa.num_heads * spec.qsa.head_dim)
        attend(
            projected,
            layer.attention,
            self.buffers.qsa,
            d.row_slots,
            d.positions,
            self.state,
            spec.qsa,
            middle,
        )
        product_into_streams(
            middle, layer.attention.out_proj, d.streams, inject, self.buffers.products
        )
        mixed, inject = self.read(d.streams, layer.moe_residual)
        moe_into_streams(
            mixed, layer.moe, self.buffers.moe, d.streams, inject, spec.moe, self.buffers.products
        )
        self._head(d.streams, layer.final, d.logits)

    def _chain_first(self, num_rows: int, num_token_ids: int, truncated: bool) -> None:
        self._draft_first(num_rows)
        self._chain_pick(0, num_token_ids, truncated)

    def _chain_next(self, step: int, num_token_ids: int, truncated: bool) -> None:
        """One more token per slot, from the layer's own streams and the pick before."""
        d, layer = self._drafting, self._draft_layer
        d.positions.add_(1)
        combined = d.combined[: d.positions.shape[0]]
        self._combine(d.picks[step - 1], d.streams, combined)
        _, projected, inject = self._draft_project(
            combined, layer.attention, d.row_slots, d.positions, d.own_rows
        )
        d.streams.copy_(combined)
        self._draft_rest(projected, inject)
        self._chain_pick(step, num_token_ids, truncated)

    def _chain_pick(self, step: int, num_token_ids: int, truncated: bool) -> None:
        d = self._drafting
        inputs = PickInputs(d.keys[step], d.temperatures, d.top_ks, d.top_ps, d.min_ps)
        picked, probability = pick(d.logits, inputs, num_token_ids, truncated=truncated)
        d.picks[step].copy_(picked)
        d.probabilities[step].copy_(probability)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPicks:
    """How a chain picks. keys: row keys [steps][B] (engine.sampling.row_key); the others one per slot."""

    keys: Sequence[Sequence[int]]
    temperatures: Sequence[float]
    top_ks: Sequence[int]
    top_ps: Sequence[float]
    min_ps: Sequence[float]
    num_token_ids: int

    @property
    def num_steps(self) -> int:
        """Drafts per slot."""
        return len(self.keys)

    @property
    def truncated(self) -> bool:
        """Whether any slot keeps only some ids."""
        return any(self.top_ks)


@dataclass(frozen=True, slots=True)
class _DraftBuffers:
    """What a chain carries from step to step, for MAX_SLOTS places."""

    ids: Tensor
    input: Tensor
    combined: Tensor
    streams: Tensor
    logits: Tensor
    row_slots: Tensor
    positions: Tensor
    own_rows: Tensor
    picks: Tensor
    probabilities: Tensor
    keys: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor

    @staticmethod
    def make(spec: ModelSpec, state: SlotState) -> _DraftBuffers:
        device = state.device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        wide, int32, int64, fp64 = spec.stream_width, torch.int32, torch.int64, torch.float64
        return _DraftBuffers(
            ids=zeros(MAX_ROWS, dtype=int64),
            input=zeros(MAX_ROWS, wide, dtype=torch.bfloat16),
            combined=zeros(MAX_ROWS, wide, dtype=torch.bfloat16),
            streams=zeros(MAX_SLOTS, wide, dtype=torch.bfloat16),
            logits=zeros(MAX_SLOTS, spec.vocab_size, dtype=torch.float32),
            row_slots=zeros(MAX_SLOTS, dtype=int32),
            positions=zeros(MAX_SLOTS, dtype=int32),
            own_rows=torch.arange(MAX_SLOTS, dtype=int32, device=device),
            picks=zeros(MAX_SPEC, MAX_SLOTS, dtype=int64),
            probabilities=zeros(MAX_SPEC, MAX_SLOTS, dtype=torch.float32),
            keys=zeros(MAX_SPEC, MAX_SLOTS, dtype=int64),
            temperatures=zeros(MAX_SLOTS, dtype=fp64),
            top_ks=zeros(MAX_SLOTS, dtype=int64),
            top_ps=zeros(MAX_SLOTS, dtype=fp64),
            min_ps=zeros(MAX_SLOTS, dtype=fp64),
        )

    def set_picks(self, picks: ChainPicks) -> None:
        """Copy from the host; places without a slot repeat the first, whose row they repeat too."""
        missing = MAX_SLOTS - len(picks.temperatures)
        for row, keys in zip(self.keys, picks.keys, strict=False):
            row.copy_(torch.tensor([_signed(k) for k in (*keys, *[keys[0]] * missing)]))
        for name in ("temperatures", "top_ks", "top_ps", "min_ps"):
            values: Sequence[float] = getattr(picks, name)
            target: Tensor = getattr(self, name)
            target.copy_(torch.tensor([*values, *[values[0]] * missing], dtype=target.dtype))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
