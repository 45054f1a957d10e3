"""Hashed n-gram embedding added to all residual streams of one layer (model.md 1.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.elementwise import sigmoid, silu

if TYPE_CHECKING:
    from engine.layers.norm import ZeroCentredNorm
    from engine.linear import RowLinear
    from engine.model_spec import PleSpec
    from engine.ple_table import Fetched, PleTable
    from engine.state import Rows, SlotState


class NgramHash:
    """Table rows of a token from its id and the ids before it, on the host.

    multipliers int64 [ngram_size], sizes and offsets int64 [heads].
    """

    __slots__ = ("_eos_id", "_multipliers", "_offsets", "_per_ngram", "_sizes", "context")

    def __init__(self, spec: PleSpec, index: int) -> None:
        self.context = spec.ngram_size - 1
        self._eos_id = spec.eos_id
        self._per_ngram = spec.heads_per_ngram
        self._multipliers = torch.tensor(spec.multipliers(index))
        self._sizes = torch.tensor(spec.head_vocab_sizes(index))
        self._offsets = torch.tensor(spec.head_offsets(index))

    def rows(self, ids: Tensor) -> Tensor:
        """ids int64 [T, context + 1], oldest first, EOS where nothing was -> table rows int64 [T, heads].

        An EOS among the earlier ids hides everything before it; an EOS as the token itself does not.
        """
        mixed = ids[:, -1] * self._multipliers[0]
        hidden = torch.zeros_like(mixed, dtype=torch.bool)
        parts: list[Tensor] = []
        for back in range(1, self.context + 1):
            earlier = ids[:, -1 - back]
            hidden = hidden | (earlier == self._eos_id)
            earlier = earlier.masked_fill(hidden, self._eos_id)
            mixed = mixed ^ (earlier * self._multipliers[back])
            heads = slice((back - 1) * self._per_ngram, back * self._per_ngram)
            parts.append(mixed.unsqueeze(-1).remainder(self._sizes[heads]))
        return torch.cat(parts, dim=-1) + self._offsets


class HashedRows:
    """A layer's table outside of what computes: rows by the ids they are hashed from. index: among the PLE layers."""

    __slots__ = ("context", "index", "table", "_hash")

    def __init__(self, spec: PleSpec, index: int, table: PleTable) -> None:
        self._hash = NgramHash(spec, index)
        self.context = self._hash.context
        self.index = index
        self.table = table

    def fetch(self, ids: Tensor) -> Fetched:
        """Begin to read the rows of ids int64 [R, context + 1] on the host: [R * heads, head dim]."""
        return self.table.fetch(self._hash.rows(ids).flatten())


class PleLayer:
    """One PLE injection; `index` is its counter among the PLE layers.

    key_value: W [S*H + H, embed dim]; conv [S*H, width].
    """

    __slots__ = (
        "_conv",
        "_dilation",
        "_hidden",
        "_history",
        "_key_value",
        "_norm_conv",
        "_norm_key",
        "_norm_query",
        "_streams",
        "index",
        "rows",
    )

    def __init__(
        self,
        *,
        index: int,
        table: PleTable,
        key_value: RowLinear,
        norm_key: ZeroCentredNorm,
        norm_query: ZeroCentredNorm,
        norm_conv: ZeroCentredNorm,
        conv: Tensor,
        num_streams: int,
        spec: PleSpec,
    ) -> None:
        self.index = index
        self.rows = HashedRows(spec, index, table)
        self._key_value = key_value
        self._norm_key = norm_key
        self._norm_query = norm_query
        self._norm_conv = norm_conv
        self._conv = conv.t().contiguous()
        self._dilation = spec.ngram_size
        self._history = spec.history_rows
        self._streams = num_streams
        self._hidden = conv.shape[0] // num_streams

    @property
    def table_bytes(self) -> int:
        """Memory of the n-gram table."""
        return self.rows.table.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense weights."""
        norms = self._norm_key.num_bytes + self._norm_query.num_bytes + self._norm_conv.num_bytes
        return self._key_value.num_bytes + norms + self._conv.numel() * self._conv.element_size()

    def window(self, streams: Tensor, fetched: Fetched, rows: Rows, state: SlotState) -> Tensor:
        """streams [R, S*H], fetched: the rows of their ids -> what to add, [R, S*H]."""
        gated, normed = self._gated(streams, fetched)
        padded = state.put_ple_rows(self.index, rows, rows.padded(normed))
        return gated.add_(rows.flat(self._convolved(padded, rows.max_rows)))

    def chunk(self, streams: Tensor, fetched: Fetched, history: Tensor) -> Tensor:
        """One prompt piece: streams [T, S*H] and the rows of its ids; history [history, S*H] is advanced."""
        gated, normed = self._gated(streams, fetched)
        padded = torch.cat((history, normed))
        history.copy_(padded[-self._history :])
        return gated.add_(self._convolved(padded.unsqueeze(0), streams.shape[0]).squeeze(0))

    def _gated(self, streams: Tensor, fetched: Fetched) -> tuple[Tensor, Tensor]:
        """The gated value and its norm, both [T, S*H]."""
        embedded = fetched().view(streams.shape[0], -1).to(streams.device, streams.dtype)
        key, value = self._key_value(embedded).split([streams.shape[1], self._hidden], dim=-1)
        key = self._norm_key(key).unflatten(-1, (self._streams, -1))
        query = self._norm_query(streams).unflatten(-1, (self._streams, -1))
        gate = (key * query).sum(-1, keepdim=True).mul_(self._hidden**-0.5)
        gate = gate.abs().clamp_min_(1e-6).sqrt_().mul_(gate.sign())
        gated = (sigmoid(gate) * value.unsqueeze(-2)).flatten(-2)
        return gated, self._norm_conv(gated)

    def _convolved(self, padded: Tensor, num_rows: int) -> Tensor:
        """Dilated causal depthwise convolution and SiLU: [B, history + T, S*H] -> [B, T, S*H]."""
        total = padded[:, :num_rows] * self._conv[0]
        for tap in range(1, self._conv.shape[0]):
            first = tap * self._dilation
            total.addcmul_(padded[:, first : first + num_rows], self._conv[tap])
        return silu(total)
