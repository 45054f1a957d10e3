"""The draft layer: one attention layer that guesses the token after next from the trunk's streams (model.md 3).

Its cell i is made from the trunk's streams at position i and the id at position i + 1. A chain feeds the layer's own
streams back; the cells it writes that way are written again from the trunk's streams once tokens are accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.residual import GatedResidual, write_back

if TYPE_CHECKING:
    from torch import Tensor

    from engine.layers.moe import MoeLayer
    from engine.layers.norm import ZeroCentredNorm
    from engine.layers.qsa import QsaLayer
    from engine.linear import RowLinear
    from engine.model import Trunk
    from engine.state import Rows, SlotState


class DraftLayer:
    """The MTP layer; embedding and head are the trunk's.

    fc_embedding and fc_hidden: W [H, H]; norm_hidden is ONE group over all S*H columns (model.md 3.3).
    """

    __slots__ = (
        "_attention",
        "_attention_residual",
        "_fc_embedding",
        "_fc_hidden",
        "_final",
        "_moe",
        "_moe_residual",
        "_norm_embedding",
        "_norm_hidden",
        "_num_streams",
        "_trunk",
    )

    def __init__(
        self,
        *,
        trunk: Trunk,
        fc_embedding: RowLinear,
        fc_hidden: RowLinear,
        norm_embedding: ZeroCentredNorm,
        norm_hidden: ZeroCentredNorm,
        attention_residual: GatedResidual,
        attention: QsaLayer,
        moe_residual: GatedResidual,
        moe: MoeLayer,
        final: GatedResidual,
        num_streams: int,
    ) -> None:
        self._trunk = trunk
        self._fc_embedding = fc_embedding
        self._fc_hidden = fc_hidden
        self._norm_embedding = norm_embedding
        self._norm_hidden = norm_hidden
        self._attention_residual = attention_residual
        self._attention = attention
        self._moe_residual = moe_residual
        self._moe = moe
        self._final = final
        self._num_streams = num_streams

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights (embedding and head are the trunk's)."""
        parts = (
            self._fc_embedding,
            self._fc_hidden,
            self._norm_embedding,
            self._norm_hidden,
            self._attention_residual,
            self._attention,
            self._moe_residual,
            self._moe,
            self._final,
        )
        return sum(part.num_bytes for part in parts)

    def read_chunk(
        self, ids: Tensor, streams: Tensor, slot: int, start: int, state: SlotState
    ) -> None:
        """Write cells [start, start + T) of one slot: ids [T] are those at the next positions, streams [T, S*H]."""
        mixed, _ = self._attention_residual.read(self._combined(ids, streams))
        self._attention.project_chunk(mixed, slot, start, state)

    def read_rows(self, ids: Tensor, streams: Tensor, rows: Rows, state: SlotState) -> None:
        """Write the cells of a window's rows without drafting."""
        mixed, _ = self._attention_residual.read(self._combined(ids, streams))
        self._attention.project(mixed, rows.slot, rows.position, state)
        self._attention.pool_window(rows, state)

    def draft(
        self, ids: Tensor, streams: Tensor, rows: Rows, last: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """Write the cells of R rows and draft from each slot's last row.

        ids int64 [R]: at the rows' positions + 1; streams [R, S*H]: the trunk's, or in a chain this layer's own;
        last int64 [B]: each slot's last row. Returns fp32 logits [B, vocab] of the token at the row's position + 2,
        and this layer's streams [B, S*H], the next step's input.
        """
        combined = self._combined(ids, streams)
        mixed, inject = self._attention_residual.read(combined)
        projected = self._attention.project(mixed, rows.slot, rows.position, state)
        self._attention.pool_window(rows, state)
        if rows.max_rows > 1:
            combined, inject = combined[last], inject[last]
            projected = projected.at(last)
        out = self._attention.attend(
            projected,
            rows.slot[last],
            rows.position[last],
            rows.last_host_positions(),
            state,
        )
        write_back(combined, inject, out)
        mixed, inject = self._moe_residual.read(combined)
        write_back(combined, inject, self._moe(mixed))
        return self._trunk.head(self._final.read(combined)[0]), combined

    def _combined(self, ids: Tensor, streams: Tensor) -> Tensor:
        """The layer's input streams [R, S*H]: every stream of the trunk projected, plus the embedded id."""
        embedded = self._fc_embedding(self._norm_embedding(self._trunk.embed(ids)))
        hidden = self._norm_hidden(streams).unflatten(-1, (self._num_streams, -1))
        projected = self._fc_hidden(hidden.flatten(0, 1)).unflatten(0, (-1, self._num_streams))
        return (projected + embedded.unsqueeze(1)).flatten(1)
