"""Sparse attention: an indexer picks blocks of keys, attention reads only those (model.md 1.5).

Axes: R rows of a window, T rows of a prompt piece, A query heads, N K/V heads, D head dim, I index dim, L keys read.
A row's shapes are a function of its position alone: it reads a whole number of key tiles that covers what it may see,
and rows are batched only as items of a batched product. So its arithmetic does not depend on its company.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.elementwise import sigmoid
from engine.layers.rotary import RotaryTable, rotate
from engine.memory_plan import QUERY_TILE_SCORES
from engine.state import KEY_TILE, RING_ROWS, Rows, SlotState

if TYPE_CHECKING:
    from engine.layers.norm import ZeroCentredNorm
    from engine.linear import ItemProducts, RowLinear
    from engine.model_spec import QsaSpec


@dataclass(slots=True)
class Projected:
    """What a layer computes from its input rows; kv and index keys are already written to the state."""

    q: Tensor
    """[R, A, D], normed and rotated."""
    gate: Tensor
    """[R, A * D]."""
    index_q: Tensor
    """[R, index heads, I], normed and rotated."""

    def at(self, rows: Tensor) -> Projected:
        """The chosen rows only."""
        return Projected(q=self.q[rows], gate=self.gate[rows], index_q=self.index_q[rows])


class QsaLayer:
    """One attention layer; `index` is its counter among the layers that hold K/V.

    in_proj: W [2*A*D + 2*N*D + (index heads + 1)*I, H]: query and gate per head, k, v, index queries, index key.
    """

    __slots__ = (
        "_in_proj",
        "_index_k_norm",
        "_index_q_norm",
        "_k_norm",
        "_most_dense_tiles",
        "_out_proj",
        "_products",
        "_q_norm",
        "_rotary",
        "_spec",
        "index",
    )

    def __init__(
        self,
        *,
        index: int,
        in_proj: RowLinear,
        out_proj: RowLinear,
        q_norm: ZeroCentredNorm,
        k_norm: ZeroCentredNorm,
        index_q_norm: ZeroCentredNorm,
        index_k_norm: ZeroCentredNorm,
        rotary: RotaryTable,
        products: ItemProducts,
        spec: QsaSpec,
        capacity: int,
    ) -> None:
        self.index = index
        self._in_proj = in_proj
        self._out_proj = out_proj
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._index_q_norm = index_q_norm
        self._index_k_norm = index_k_norm
        self._rotary = rotary
        self._products = products
        self._spec = spec
        self._most_dense_tiles = -(-min(spec.dense_tokens, capacity) // KEY_TILE)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        norms = (self._q_norm, self._k_norm, self._index_q_norm, self._index_k_norm)
        return self._in_proj.num_bytes + self._out_proj.num_bytes + sum(n.num_bytes for n in norms)

    def window(self, x: Tensor, rows: Rows, state: SlotState) -> Tensor:
        """One verify window: x [R, H] of all slots' rows -> [R, H]. Writes the rows' cells."""
        projected = self.project(x, rows.slot, rows.position, state)
        self.pool_window(rows, state)
        return self.attend(projected, rows.slot, rows.position, rows.host_position, state)

    def project(self, x: Tensor, slot: Tensor, position: Tensor, state: SlotState) -> Projected:
        """x [R, H] -> queries; writes K, V and raw index keys of the rows' cells."""
        projected, k, v, index_k = self._split(x, position)
        cells = (self.index, slot, slice(None), position)
        state.keys.write(cells, k)
        state.values.write(cells, v)
        state.index_ring[self.index, slot, position % RING_ROWS] = index_k
        return projected

    def _split(self, x: Tensor, position: Tensor) -> tuple[Projected, Tensor, Tensor, Tensor]:
        """x [R, H] -> queries, k [R, N, D] and v [R, N, D] to be cached, raw index key [R, I]."""
        spec = self._spec
        heads, kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        sizes = [
            2 * heads * dim,
            kv * dim,
            kv * dim,
            spec.num_index_heads * spec.index_dim,
            spec.index_dim,
        ]
        q_gate, k, v, index_q, index_k = torch.split_with_sizes(self._in_proj(x), sizes, -1)
        q, gate = q_gate.unflatten(-1, (heads, 2, dim)).unbind(2)
        cos, sin = self._rotary.at(position)
        index_q = self._index_q_norm(index_q.unflatten(-1, (-1, spec.index_dim)))
        projected = Projected(
            q=rotate(self._q_norm(q), cos, sin),
            gate=gate.flatten(1),
            index_q=rotate(index_q, cos, sin),
        )
        k = rotate(self._k_norm(k.unflatten(-1, (kv, dim))), cos, sin)
        return projected, k, v.unflatten(-1, (kv, dim)), index_k

    def pool_window(self, rows: Rows, state: SlotState) -> None:
        """Pool the blocks that the window's rows complete. A block of rejected rows is pooled again when reached."""
        block = self._spec.block_tokens
        done = [i for i, p in enumerate(rows.host_position) if (p + 1) % block == 0]
        if not done:
            return
        at = torch.tensor(done, device=rows.slot.device)
        slot, last = rows.slot[at], rows.position[at]
        cells = last.unsqueeze(-1) - torch.arange(block - 1, -1, -1, device=last.device)
        raw = state.index_ring[self.index, slot.unsqueeze(-1), cells % RING_ROWS]
        pooled = self._pooled(raw, cells[:, 0])
        state.index_blocks[self.index, slot, cells[:, 0] // block] = pooled

    def _pooled(self, raw: Tensor, first: Tensor) -> Tensor:
        """Raw keys [n, block, I] of blocks that begin at positions first [n] -> index keys [n, I]."""
        mean = raw.to(torch.float32).sum(1).mul_(1.0 / raw.shape[1]).to(raw.dtype)
        cos, sin = self._rotary.at(first)
        return rotate(self._index_k_norm(mean).unsqueeze(1), cos, sin).squeeze(1)

    def attend(
        self,
        projected: Projected,
        slot: Tensor,
        position: Tensor,
        host_position: tuple[int, ...],
        state: SlotState,
    ) -> Tensor:
        """Attention of rows over their slots' cells, then the output projection: -> [R, H]."""
        groups = self._groups(host_position)
        if len(groups) == 1:
            out = self._attend_group(groups[0][0], projected, slot, position, state)
            return self._output(out, projected.gate)
        out = torch.empty_like(projected.q)
        for tiles, members in groups:
            at = torch.tensor(members, device=slot.device)
            part = projected.at(at)
            out[at] = self._attend_group(tiles, part, slot[at], position[at], state)
        return self._output(out, projected.gate)

    def _groups(self, host_position: tuple[int, ...]) -> list[tuple[int, list[int]]]:
        """Rows by the number of key tiles they read; a negative number means: selected keys, that many index tiles."""
        groups: dict[int, list[int]] = {}
        for row, p in enumerate(host_position):
            visible = p + 1
            if visible <= self._spec.dense_tokens:
                tiles = min(_tiles(visible), self._most_dense_tiles)
            else:
                tiles = -_tiles(visible // self._spec.block_tokens)
            groups.setdefault(tiles, []).append(row)
        return list(groups.items())

    def _attend_group(
        self, tiles: int, projected: Projected, slot: Tensor, position: Tensor, state: SlotState
    ) -> Tensor:
        """Rows that read the same number of tiles: -> [R, A, D]."""
        if tiles > 0:
            cells = torch.arange(tiles * KEY_TILE, device=slot.device)
            cells = cells.expand(slot.shape[0], -1)
            allowed = cells <= position.unsqueeze(-1)
        else:
            cells, allowed = self._select(-tiles, projected.index_q, slot, position, state)
        spec = self._spec
        num_rows, num_kv = slot.shape[0], spec.num_kv_heads
        head = torch.arange(num_kv, device=slot.device)
        base = (slot.unsqueeze(-1) * num_kv + head) * state.capacity
        flat = (base.unsqueeze(-1) + cells.unsqueeze(1)).flatten()
        shape = (num_rows * num_kv, cells.shape[1], spec.head_dim)
        k = state.keys.gather(self.index, flat).view(shape)
        v = state.values.gather(self.index, flat).view(shape)
        q = projected.q.reshape(num_rows * num_kv, -1, spec.head_dim)
        scores = self._products(q, k.transpose(1, 2), group=num_kv).to(torch.float32)
        scores = scores.mul_(spec.head_dim**-0.5).unflatten(0, (num_rows, num_kv))
        scores.masked_fill_(~allowed[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(q.dtype).flatten(0, 1)
        out = self._products(weights, v, group=num_kv)
        return out.view(num_rows, spec.num_heads, spec.head_dim)

    def _select(
        self, tiles: int, index_q: Tensor, slot: Tensor, position: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """Cells each row attends to beyond the budget: int64 [R, L] ascending, and which of them count [R, L]."""
        spec = self._spec
        keys = state.index_blocks[self.index, slot, : tiles * KEY_TILE]
        scores = self._block_scores(index_q, keys)
        complete = ((position + 1) // spec.block_tokens).unsqueeze(-1)
        blocks = torch.arange(keys.shape[1], device=slot.device)
        scores.masked_fill_(blocks >= complete, float("-inf"))
        chosen = scores.topk(spec.budget_blocks, dim=-1).indices.sort(dim=-1).values
        offsets = torch.arange(spec.block_tokens, device=slot.device)
        cells = (chosen.unsqueeze(-1) * spec.block_tokens + offsets).flatten(1)
        tail = complete * spec.block_tokens + offsets[:-1]
        cells = torch.cat((cells, tail), dim=-1)
        allowed = cells <= position.unsqueeze(-1)
        missing = -cells.shape[1] % KEY_TILE
        cells = torch.nn.functional.pad(cells, (0, missing))
        return cells, torch.nn.functional.pad(allowed, (0, missing), value=False)

    def _block_scores(self, index_q: Tensor, keys: Tensor) -> Tensor:
        """index_q [R, heads, I], keys [R, blocks, I] -> fp32 [R, blocks]."""
        q, k = index_q.to(torch.float32), keys.to(torch.float32)
        per_head = self._products(q, k.transpose(1, 2), group=1).relu_()
        total = per_head[:, 0].clone()
        for head in range(1, per_head.shape[1]):
            total += per_head[:, head]
        return total.mul_(self._spec.index_dim**-0.5)

    def chunk(self, x: Tensor, slot: int, start: int, state: SlotState) -> Tensor:
        """One prompt piece of one slot: x [T, H] at positions [start, start + T) -> [T, H]. Writes its cells."""
        projected = self.project_chunk(x, slot, start, state)
        num_rows = x.shape[0]
        end = start + num_rows
        position = torch.arange(start, end, device=x.device)
        cells = (self.index, slot, slice(None), slice(end))
        k, v = state.keys.read(cells), state.values.read(cells)
        blocks = state.index_blocks[self.index, slot, : end // self._spec.block_tokens]
        per_tile = max(1, QUERY_TILE_SCORES // (self._spec.num_heads * end))
        out = torch.empty_like(projected.q)
        for first in range(0, num_rows, per_tile):
            at = slice(first, first + per_tile)
            allowed = self._allowed(projected.index_q[at], blocks, position[at], end)
            out[at] = _masked_attention(projected.q[at], k, v, allowed)
        return self._output(out, projected.gate)

    def project_chunk(self, x: Tensor, slot: int, start: int, state: SlotState) -> Projected:
        """As `project` for a prompt piece, and pools every block that it completes."""
        end = start + x.shape[0]
        position = torch.arange(start, end, device=x.device)
        projected, k, v, index_k = self._split(x, position)
        cells = (self.index, slot, slice(None), slice(start, end))
        state.keys.write(cells, k.transpose(0, 1))
        state.values.write(cells, v.transpose(0, 1))
        ring = state.index_ring[self.index, slot]
        block = self._spec.block_tokens
        first = start - start % block
        raw = torch.cat((ring[torch.arange(first, start, device=x.device) % RING_ROWS], index_k))
        num_blocks = raw.shape[0] // block
        if num_blocks:
            starts = torch.arange(first, first + num_blocks * block, block, device=x.device)
            pooled = self._pooled(raw[: num_blocks * block].unflatten(0, (-1, block)), starts)
            at = first // block
            state.index_blocks[self.index, slot, at : at + num_blocks] = pooled
        kept = position[-RING_ROWS:]
        ring[kept % RING_ROWS] = index_k[-RING_ROWS:]
        return projected

    def _allowed(self, index_q: Tensor, blocks: Tensor, position: Tensor, end: int) -> Tensor:
        """Which of cells [0, end) each query of a prompt piece attends to: bool [T, end].

        index_q [T, index heads, I]; blocks [B, I], the index keys of all complete blocks.
        """
        spec = self._spec
        cells = torch.arange(end, device=position.device)
        causal = cells <= position.unsqueeze(-1)
        if end <= spec.dense_tokens:
            return causal
        complete = ((position + 1) // spec.block_tokens).unsqueeze(-1)
        keys = blocks.expand(position.shape[0], -1, -1)
        scores = self._block_scores(index_q, keys)
        order = torch.arange(blocks.shape[0], device=position.device)
        scores.masked_fill_(order >= complete, float("-inf"))
        # A query with fewer complete blocks than the budget also picks blocks it cannot see; `causal` drops them.
        chosen = scores.topk(spec.budget_blocks, dim=-1).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        kept = kept.repeat_interleave(spec.block_tokens, dim=-1)
        kept = torch.nn.functional.pad(kept, (0, end - kept.shape[1]), value=False)
        tail = cells >= complete * spec.block_tokens
        return (kept | tail) & causal

    def _output(self, out: Tensor, gate: Tensor) -> Tensor:
        """out [R, A, D] gated per element by sigmoid(gate [R, A*D]), then projected."""
        return self._out_proj(out.flatten(1) * sigmoid(gate))


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """q [T, A, D], k and v [N, L, D], allowed [T, L] -> [T, A, D]."""
    num_rows, num_heads, dim = q.shape
    num_kv = k.shape[0]
    grouped = q.unflatten(1, (num_kv, -1)).transpose(0, 1).reshape(num_kv, -1, dim)
    scores = torch.bmm(grouped, k.transpose(1, 2)).to(torch.float32).mul_(dim**-0.5)
    scores = scores.unflatten(1, (num_rows, -1))
    scores.masked_fill_(~allowed[None, :, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(q.dtype).flatten(1, 2)
    out = torch.bmm(weights, v).unflatten(1, (num_rows, -1))
    return out.transpose(0, 1).reshape(num_rows, num_heads, dim)


def _tiles(count: int) -> int:
    """Tiles that cover `count` entries, rounded up to a power of two so that rows fall into few groups."""
    return 1 << (-(-count // KEY_TILE) - 1).bit_length()
