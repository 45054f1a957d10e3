"""The trunk: embedding, layers over residual streams, final mixer, head (model.md 1.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.layers.gdn import GdnLayer
from engine.layers.residual import GatedResidual, write_back
from engine.state import GdnWindow, KeptRows, Rows, SlotState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.layers.moe import MoeLayer
    from engine.layers.ple import PleLayer
    from engine.layers.qsa import QsaLayer
    from engine.linear import RowLinear
    from engine.ple_table import Fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One trunk layer: an optional PLE injection, then attention or GDN, then MoE, each behind a gated residual."""

    ple: PleLayer | None
    mixer_residual: GatedResidual
    mixer: GdnLayer | QsaLayer
    gdn_index: int
    """Counter among the GDN layers; meaningless for attention."""
    moe_residual: GatedResidual
    moe: MoeLayer


class Trunk:
    """The stack of layers, or of those that one stage of a pipeline holds. Stateless: sequences live in SlotState.

    embedding [vocab, H]: None where neither ids come in nor a draft layer is; final: None where no logits come out.
    """

    __slots__ = ("_embedding", "_final", "_head", "_num_streams", "layers", "ngram_context")

    def __init__(
        self,
        *,
        embedding: Tensor | None,
        layers: tuple[DecoderLayer, ...],
        final: GatedResidual | None,
        num_streams: int,
    ) -> None:
        self._embedding = embedding
        self.layers = layers
        self._final = final
        self._head: RowLinear | None = None
        self._num_streams = num_streams
        contexts = [layer.ple.rows.context for layer in layers if layer.ple is not None]
        self.ngram_context = max(contexts, default=0)

    def set_head(self, head: RowLinear) -> None:
        """Give the trunk its head, which a start loads after everything but the expert cache."""
        self._head = head

    @property
    def head_bytes(self) -> int:
        """Bytes of the head."""
        return 0 if self._head is None else self._head.num_bytes

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, H]."""
        assert self._embedding is not None
        return self._embedding.index_select(0, ids)

    def window(
        self, ids: Tensor, rows: Rows, state: SlotState, streams: Tensor | None = None
    ) -> Tensor:
        """One verify window. ids int64 [R, context + 1] on the host, each row's id last, earlier ids before it.

        streams: those of the layer before the first one here, changed in place; None: embed the ids.
        Returns the residual streams after the last layer, [R, S*H]. Nothing is committed.
        """
        fetched = self.fetch(ids)
        streams = self.start(ids) if streams is None else streams
        for layer in self.layers:
            self.window_layer(layer, streams, fetched, rows, state)
        return streams

    def window_layer(
        self,
        layer: DecoderLayer,
        streams: Tensor,
        fetched: Mapping[int, Fetched],
        rows: Rows,
        state: SlotState,
    ) -> None:
        """One layer of a verify window, in place on the streams [R, S*H]."""
        if layer.ple is not None:
            streams.add_(layer.ple.window(streams, fetched[layer.ple.index], rows, state))
        mixed, inject = layer.mixer_residual.read(streams)
        if isinstance(layer.mixer, GdnLayer):
            view = GdnWindow(layer=layer.gdn_index, rows=rows, state=state)
            out = layer.mixer.window(mixed, rows, view)
        else:
            out = layer.mixer.window(mixed, rows, state)
        write_back(streams, inject, out)
        mixed, inject = layer.moe_residual.read(streams)
        write_back(streams, inject, layer.moe(mixed))

    def chunk(
        self, ids: Tensor, slot: int, start: int, state: SlotState, streams: Tensor | None = None
    ) -> Tensor:
        """Read a prompt piece of one slot and advance its state. ids and streams as in `window`, [T, context + 1].

        Returns the streams after the last layer, [T, S*H].
        """
        fetched = self.fetch(ids)
        streams = self.start(ids) if streams is None else streams
        for layer in self.layers:
            if layer.ple is not None:
                history = state.ple[layer.ple.index, slot, : state.ple_history]
                streams.add_(layer.ple.chunk(streams, fetched[layer.ple.index], history))
            mixed, inject = layer.mixer_residual.read(streams)
            if isinstance(layer.mixer, GdnLayer):
                history = state.conv[layer.gdn_index, slot, : state.conv_history]
                out = layer.mixer.chunk(mixed, state.s[layer.gdn_index, slot], history)
            else:
                out = layer.mixer.chunk(mixed, slot, start, state)
            write_back(streams, inject, out)
            mixed, inject = layer.moe_residual.read(streams)
            write_back(streams, inject, layer.moe(mixed))
        return streams

    def commit(self, kept: Mapping[int, KeptRows], streams: Tensor, state: SlotState) -> None:
        """Keep the first rows of slots' last window, whose streams [R, S*H] wait for their draft-layer cells."""
        for slot, rows in kept.items():
            state.commit(slot, rows.count)
            state.keep_streams(slot, streams[rows.first :][: rows.count])

    def logits(self, streams: Tensor) -> Tensor:
        """Streams [T, S*H] -> fp32 logits [T, vocab]."""
        assert self._final is not None
        return self.head(self._final.read(streams)[0])

    def head(self, x: Tensor) -> Tensor:
        """Mixed rows [T, H] -> fp32 logits [T, vocab]."""
        assert self._head is not None
        return self._head(x).to(torch.float32)

    def fetch(self, ids: Tensor) -> dict[int, Fetched]:
        """Begin to read what the PLE layers need of ids int64 [T, context + 1] on the host, by their index."""
        injecting = (layer.ple for layer in self.layers if layer.ple is not None)
        return {ple.index: ple.rows.fetch(ids) for ple in injecting}

    def start(self, ids: Tensor) -> Tensor:
        """The streams [T, S*H] before the first layer; ids [T, context + 1]."""
        assert self._embedding is not None
        ids = ids.to(self._embedding.device, non_blocking=True)
        return self.embed(ids[:, -1]).repeat(1, self._num_streams)
