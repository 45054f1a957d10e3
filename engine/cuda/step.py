"""CudaStep: the decode step on a GPU. Owns the buffers of a window, runs its kernels, and replays them as graphs.

A graph is captured per number of rows; which slots the rows belong to, and where they stand, it reads from device
tensors. Trunk and draft layer of one model share one CudaStep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.cuda.gdn import GdnScratch, commit_rows, gdn_window, keep_streams
from engine.cuda.layout import MAX_ROWS, WindowLayout
from engine.cuda.moe import MoeScratch, moe_into_streams
from engine.cuda.norm import norm_rows
from engine.cuda.picks import PickTable, pick
from engine.cuda.ple import PleScratch, ple_into_streams
from engine.cuda.products import ProductScratch, product, product_into_streams
from engine.cuda.qsa import QsaScratch, attend, write_cells
from engine.cuda.residual import ResidualScratch, read_streams
from engine.cuda.sizes import tensor_bytes
from engine.interface import MAX_SLOTS, MAX_SPEC
from engine.sampling import Picks
from engine.state import WINDOW_ROWS, KeptRows

if TYPE_CHECKING:
    from engine.cuda.first_come import FirstCome
    from engine.cuda.gdn import GdnWeights
    from engine.cuda.pool import FarPool
    from engine.cuda.qsa import QsaWeights
    from engine.cuda.residual import ResidualWeights
    from engine.cuda.weights import CudaDraftLayer, CudaLayer, CudaModel
    from engine.model_spec import ModelSpec
    from engine.sampling import PickRow
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
        logits=empty(spec.vocab_size if spec.is_last else 0, torch.float32),
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
        # torch's own belongs to the device that was captured on first in this process.
        self._stream = torch.cuda.Stream() if enabled else None

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
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        self._pool = graph.pool()
        return graph


class CudaStep:
    """Window, commit and draft chain of one model over one SlotState. One thread calls it."""

    def __init__(
        self,
        model: CudaModel,
        state: SlotState,
        num_token_ids: int,
        *,
        graphs: bool = True,
        pool: FarPool | None = None,
        first_come: FirstCome | None = None,
    ) -> None:
        """num_token_ids: ids from here on have no text and are never picked; pool: see moe_into_streams.

        first_come: moves experts between windows.
        """
        self.model = model
        self.pool = pool
        self.first_come = first_come
        self.state = state
        self._context = model.spec.ple.ngram_size if model.spec.ple else 1
        self._tables = model.tables
        self.num_token_ids = num_token_ids
        self.layout = WindowLayout(state.device)
        self.draft_layout = WindowLayout(state.device)
        self.buffers = _make_buffers(model.spec, state.capacity, state.device)
        self._draft = _DraftBuffers.make(model.spec, state) if model.draft is not None else None
        self._chain_table = PickTable(MAX_SPEC, MAX_SLOTS, state.device)
        self._graphs = Graphs(enabled=graphs)
        num_slots = state.s.shape[1]
        # By slot: rows kept, and the first flat row.
        self._kept = torch.zeros(2, num_slots, dtype=torch.int32, device=state.device)
        self._table = PickTable(1, MAX_ROWS, state.device)
        self._picked = torch.zeros(2, MAX_ROWS, dtype=torch.float64, device=state.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, beside weights and slots' state."""
        own = (self.layout.packed, self.draft_layout.packed, self._kept, self._table.packed)
        own += (self._chain_table.packed, self._picked)
        return tensor_bytes((*own, self.buffers, self._draft))

    def prepare(self) -> None:
        """Compile and capture everything that runs between two prompts. No expert comes by it.

        Spoils all slots: call it before any is seated.
        """
        num_slots = self._kept.shape[1]
        device = self.state.device
        # Where no ids are embedded: cells of what was never written might be no numbers, for ever.
        self.buffers.streams.zero_()
        for num_rows in range(1, num_slots * WINDOW_ROWS + 1):
            whole, rest = divmod(num_rows, WINDOW_ROWS)
            counts = [WINDOW_ROWS] * whole + [rest] * (rest > 0)
            slots, starts = range(len(counts)), [0] * len(counts)
            ids = torch.zeros(num_rows, self._context, dtype=torch.int64)
            self._run_window(ids, slots, counts, starts)
            if self.model.spec.is_last:
                self._graphs.run(("picks", num_rows), lambda n=num_rows: self._pick_window(n))
            if self._draft is not None:
                self._prepare_drafts(ids[:, -1].to(device), slots, counts, starts)
        if self.model.spec.is_last:
            self._graphs.run("picks of few", self._pick_few)
        self.commit({})

    def _prepare_drafts(
        self, ids: Tensor, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        num_rows = ids.shape[0]
        self._fill_draft(ids, self.buffers.streams[:num_rows], slots, counts, starts)
        self._graphs.run(("cells", num_rows), lambda: self._draft_cells(num_rows))
        self._graphs.run(("draft", num_rows), lambda: self._draft_first(num_rows))
        for truncated in (False, True):
            self._run_chain(num_rows, MAX_SPEC, truncated=truncated)

    # Windows

    def window(
        self,
        ids: Tensor,
        slots: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        streams: Tensor | None = None,
    ) -> Tensor:
        """One verify window; ids int64 [R, context + 1] on the host, each row's id last. Nothing is committed.

        streams: those of the stage before this one, if there is one; else the ids are embedded.
        Returns the streams after the last layer, bf16 [R, S*H]: valid until the next window. `logits` has the logits.
        """
        if self.first_come is None:
            return self._run_window(ids, slots, counts, starts, streams)
        self.first_come.admit()
        found = self._run_window(ids, slots, counts, starts, streams)
        self.first_come.watch(ids.shape[0])
        return found

    def _run_window(
        self,
        ids: Tensor,
        slots: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        streams: Tensor | None = None,
    ) -> Tensor:
        num_rows = ids.shape[0]
        ids = ids[:, -self._context :]
        fetched = [(table.index, table.fetch(ids)) for table in self._tables]
        self.layout.fill(slots, counts, starts)
        # Memory that is not pinned is copied before the call returns, and nobody waits for the device.
        self.buffers.ids[: ids.numel()].copy_(ids.flatten(), non_blocking=True)
        if streams is not None:
            self.buffers.streams[:num_rows].copy_(streams)
        for index, wait in fetched:
            assert self.buffers.ple is not None
            embedded = self.buffers.ple.embedded[index, :num_rows]
            embedded.copy_(wait().view(num_rows, -1), non_blocking=True)
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

    def pick(self, logits: Tensor, rows: Sequence[PickRow]) -> Picks:
        """One id for each row of logits fp32 [R, vocab], R <= MAX_ROWS, with `pick_rows.can_pick`; waits for them.

        The last window's own logits, all rows of it, are picked by a graph.
        """
        truncated = self._table.fill([rows])
        count = len(rows)
        if logits.data_ptr() != self.buffers.logits.data_ptr():
            self._pick(logits, truncated=truncated)
        elif truncated:
            self._graphs.run("picks of few", self._pick_few)
        else:
            self._graphs.run(("picks", count), lambda: self._pick_window(count))
        ids, probabilities = self._picked[:, :count].tolist()
        return Picks(
            ids=[int(i) for i in ids],
            probabilities=probabilities,
            finite=[p == p for p in probabilities],
        )

    def _pick_window(self, num_rows: int) -> None:
        self._pick(self.buffers.logits[:num_rows], truncated=False)

    def _pick_few(self) -> None:
        """Always of all rows, used or not: library operations may sum otherwise for another number."""
        self._pick(self.buffers.logits, truncated=True)

    def _pick(self, logits: Tensor, *, truncated: bool) -> None:
        count = logits.shape[0]
        inputs = self._table.inputs(0, count)
        found = pick(logits, inputs, self.num_token_ids, truncated=truncated)
        for row, values in zip(self._picked, found, strict=True):
            row[:count].copy_(values)

    def commit(self, kept: Mapping[int, KeptRows]) -> None:
        """Keep the first rows of each slot's last window, whose streams wait for their draft-layer cells."""
        none = KeptRows(0, 0)
        rows = [kept.get(slot, none) for slot in range(self._kept.shape[1])]
        values = [[r.count for r in rows], [r.first for r in rows]]
        self._kept.copy_(torch.tensor(values, dtype=torch.int32), non_blocking=True)
        self._graphs.run("commit", self._commit)

    def _commit(self) -> None:
        kept, firsts = self._kept
        commit_rows(self.state, kept, self.model.spec.gdn)
        keep_streams(self.state, self.buffers.streams, kept, firsts)

    def stages(self, num_rows: int) -> dict[str, Callable[[], None]]:
        """Parts of the last window, each to be run by itself: the start, all layers of a kind, the head."""
        kinds: dict[str, list[CudaLayer]] = {}
        for layer in self.model.layers:
            kind = "QSA layers" if layer.gdn is None else "GDN layers"
            kinds.setdefault(kind if layer.ple is None else f"{kind} with PLE", []).append(layer)
        ids, streams = self._rows(num_rows)
        works: dict[str, Callable[[], None]] = {
            "start": lambda: self._start(ids, streams),
            **{
                kind: partial(self._run_layers, layers, ids, streams)
                for kind, layers in kinds.items()
            },
            "head": lambda: self._window_head(streams),
        }
        return {
            name: partial(self._graphs.run, ("stage", name, num_rows), work)
            for name, work in works.items()
        }

    def _window(self, num_rows: int) -> None:
        ids, streams = self._rows(num_rows)
        if self.model.spec.is_first:
            self._start(ids, streams)
        self._run_layers(self.model.layers, ids, streams)
        if self.model.spec.is_last:
            self._window_head(streams)

    def _run_layers(self, layers: Sequence[CudaLayer], ids: Tensor, streams: Tensor) -> None:
        """One after the other; the pool's threads stay awake until the last that needs them."""
        tiered = [n for n, x in enumerate(layers) if x.moe.far is not None and x.moe.far.count]
        for number, layer in enumerate(layers):
            self._layer(layer, ids, streams, rests=number == max(tiered, default=0))

    def _rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """A window's ids int64 [R, context + 1] and streams [R, S*H]."""
        b, context = self.buffers, self._context
        return b.ids[: num_rows * context].view(num_rows, context), b.streams[:num_rows]

    def _start(self, ids: Tensor, streams: Tensor) -> None:
        assert self.model.embedding is not None
        embedded = self.model.embedding.index_select(0, ids[:, -1])
        streams.copy_(embedded.repeat(1, self.model.spec.num_streams))

    def _window_head(self, streams: Tensor) -> None:
        assert self.model.final is not None
        self._head(streams, self.model.final, self.buffers.logits[: streams.shape[0]])

    def _layer(self, layer: CudaLayer, ids: Tensor, streams: Tensor, *, rests: bool) -> None:
        """One layer of a window, in place on the streams."""
        spec, b = self.model.spec, self.buffers
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
        mixed, inject = self.read(streams, layer.mixer_residual)
        if layer.gdn is not None:
            self._gdn(mixed, layer.gdn, layer.gdn_index, streams, inject)
        else:
            assert layer.qsa is not None
            self._attention(mixed, layer.qsa, streams, inject)
        mixed, inject = self.read(streams, layer.moe_residual)
        scratch = b.moe
        if self.first_come is not None and layer.moe.far is not None:
            scratch = self.first_come.scratch(scratch, layer.moe.far)
        moe_into_streams(
            mixed, layer.moe, scratch, streams, inject, spec.moe, self.pool, rests=rests
        )

    def _gdn(
        self, mixed: Tensor, weights: GdnWeights, index: int, streams: Tensor, inject: Tensor
    ) -> None:
        spec, b = self.model.spec, self.buffers
        num_rows = mixed.shape[0]
        projected = self.projected(num_rows, weights.in_proj)
        product(mixed, weights.in_proj, projected, b.products)
        middle = self.middle(num_rows, spec.gdn.value_channels)
        gdn_window(
            projected,
            weights,
            b.gdn,
            self.layout,
            self.state,
            index,
            spec.gdn,
            spec.norm_eps,
            middle,
        )
        product_into_streams(middle, weights.out_proj, streams, inject, b.products)

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
        assert self.model.head is not None
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
        picks: Sequence[Sequence[PickRow]],
    ) -> list[Picks]:
        """Draft len(picks) tokens per slot without the host in between; picks: by step, then by slot.

        Every step is run for every slot; the caller cuts each chain where its gate says.
        """
        d = self._drafting
        num_rows = self._fill_draft(ids, streams, slots, counts, starts)
        truncated = self._chain_table.fill(picks)
        self._run_chain(num_rows, len(picks), truncated=truncated)
        found = d.found[: len(picks), :, : len(slots)].tolist()
        return [Picks(ids=[int(i) for i in ids], probabilities=p) for ids, p in found]

    def _run_chain(self, num_rows: int, num_steps: int, *, truncated: bool) -> None:
        first = ("chain", num_rows, truncated)
        self._graphs.run(first, lambda: self._chain_first(num_rows, truncated=truncated))
        for step in range(1, num_steps):
            following = ("next", step, truncated)
            self._graphs.run(following, lambda j=step: self._chain_next(j, truncated=truncated))

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
        assert self.model.embedding is not None
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
        moe_into_streams(mixed, layer.moe, self.buffers.moe, d.streams, inject, spec.moe)
        self._head(d.streams, layer.final, d.logits)

    def _chain_first(self, num_rows: int, *, truncated: bool) -> None:
        self._draft_first(num_rows)
        self._chain_pick(0, truncated=truncated)

    def _chain_next(self, step: int, *, truncated: bool) -> None:
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
        self._chain_pick(step, truncated=truncated)

    def _chain_pick(self, step: int, *, truncated: bool) -> None:
        d = self._drafting
        inputs = self._chain_table.inputs(step, MAX_SLOTS)
        picked, probability = pick(d.logits, inputs, self.num_token_ids, truncated=truncated)
        d.picks[step].copy_(picked)
        d.found[step, 0].copy_(picked)
        d.found[step, 1].copy_(probability)


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
    found: Tensor
    """fp64 [MAX_SPEC, 2, MAX_SLOTS]: ids and probabilities, read at once."""

    @staticmethod
    def make(spec: ModelSpec, state: SlotState) -> _DraftBuffers:
        device = state.device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        wide, int32, int64 = spec.stream_width, torch.int32, torch.int64
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
            found=zeros(MAX_SPEC, 2, MAX_SLOTS, dtype=torch.float64),
        )
