"""Per-slot state of the layers and its roll-back (product.md D4, model.md 2).

Owns every tensor that belongs to a sequence. A verify window writes K/V, index keys and convolution inputs beyond the
committed length and advances S by the first row only; `commit` then moves each slot forward by the rows that were
kept, replaying S from the rows' small inputs. What is not committed is overwritten by the next window.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.interface import MAX_SPEC
from engine.kv_cells import KvCells

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec

WINDOW_ROWS = MAX_SPEC + 1
"""Most rows of one slot in one window."""
RING_ROWS = 16
"""Raw index keys kept per slot: an open block and a window, to the next power of two."""
KEY_TILE = 64
"""K/V capacity is a multiple of this, so that a row may read whole tiles."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What is kept of a slot's rows in a window: `count` >= 1 of them, flat rows from `first` on."""

    first: int
    count: int


class Rows:
    """Rows of one window, laid out slot after slot; slots with more rows come first.

    Flat tensors have R rows; `padded` gives [B, T, ...] with T the most rows of any slot. Index tensors are made when
    they are first asked for: the compiled step asks for none.
    """

    def __init__(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        device: torch.device,
    ) -> None:
        """slots: B distinct slots by falling row count; counts: rows of each; starts: first position of each."""
        self.slots = tuple(slots)
        self._counts = tuple(counts)
        self.max_rows = self._counts[0]
        self._uniform = self._counts[-1] == self.max_rows
        self._pairs = [(b, j) for b, n in enumerate(counts) for j in range(n)]
        self.host_position = tuple(starts[b] + j for b, j in self._pairs)
        self._device = device

    @cached_property
    def slot(self) -> Tensor:
        """int64 [R]: each row's slot."""
        return torch.tensor([self.slots[b] for b, _ in self._pairs], device=self._device)

    @cached_property
    def position(self) -> Tensor:
        """int64 [R]: each row's position."""
        return torch.tensor(self.host_position, device=self._device)

    @cached_property
    def _pad_index(self) -> Tensor:
        firsts = [sum(self._counts[:b]) for b in range(len(self._counts))]
        pads = [
            firsts[b] + min(j, count - 1)
            for b, count in enumerate(self._counts)
            for j in range(self.max_rows)
        ]
        return torch.tensor(pads, device=self._device)

    @cached_property
    def _flat_index(self) -> Tensor:
        flat = [b * self.max_rows + j for b, j in self._pairs]
        return torch.tensor(flat, device=self._device)

    def active(self, j: int) -> int:
        """How many slots, from the front, have a row j."""
        return sum(1 for count in self._counts if count > j)

    def counts(self) -> tuple[int, ...]:
        """Rows of each slot."""
        return self._counts

    def last_host_positions(self) -> tuple[int, ...]:
        """Position of each slot's last row."""
        return tuple(self.host_position[i] for i in self.last_rows())

    def last_rows(self) -> tuple[int, ...]:
        """Flat index of each slot's last row."""
        return tuple(itertools.accumulate(self._counts, initial=-1))[1:]

    def padded(self, x: Tensor) -> Tensor:
        """[R, ...] -> [B, T, ...]; a slot's missing rows repeat its last one."""
        if not self._uniform:
            x = x.index_select(0, self._pad_index)
        return x.unflatten(0, (len(self.slots), self.max_rows))

    def flat(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [R, ...]."""
        x = x.flatten(0, 1)
        return x if self._uniform else x.index_select(0, self._flat_index)


@dataclass(slots=True)
class GdnWindow:
    """One GDN layer's view of the state during one window."""

    layer: int
    rows: Rows
    state: SlotState

    def put_rows(self, qkv: Tensor) -> Tensor:
        """Store projected rows [B, T, C] after the history; returns [B, width-1+T, C], oldest first."""
        buffer = self.state.conv[self.layer]
        return _put_after_history(buffer, self.state.conv_history, self.rows.slots, qkv)

    def load(self) -> Tensor:
        """A copy of S [B, V, dk, dv] of the window's slots, to step on."""
        return self.state.s[self.layer, list(self.rows.slots)]

    def store(self, s: Tensor) -> None:
        """S after each slot's first row."""
        self.state.s[self.layer, list(self.rows.slots)] = s

    def keep(self, *, k: Tensor, delta: Tensor, factor: Tensor) -> None:
        """What replaying the later rows needs: k [B, T, V, dk], delta [B, T, V, dv], factor [B, T, V]."""
        if self.rows.max_rows == 1:
            return
        at = list(self.rows.slots)
        t = self.rows.max_rows
        self.state.replay_k[self.layer, at, :t] = k
        self.state.replay_delta[self.layer, at, :t] = delta
        self.state.replay_factor[self.layer, at, :t] = factor


class SlotState:
    """All per-sequence tensors of all slots. Layers index them by their own counter, not by trunk layer.

    s            fp32  [gdn layers, slots, V, dk, dv]
    conv         dtype [gdn layers, slots, width-1 + WINDOW_ROWS, C]: history, then the window's rows
    ple          dtype [ple layers, slots, history + WINDOW_ROWS, S*H]
    k, v         kv_dtype [qsa layers + draft layers, slots, kv heads, capacity, head dim]
    k_scale, v_scale   fp32 [qsa layers + draft layers, slots, kv heads, capacity]; None unless kv_dtype is int8
    index_ring   dtype [qsa layers + draft layers, slots, RING_ROWS, index dim]: raw keys at position % RING_ROWS
    index_blocks dtype [qsa layers + draft layers, slots, capacity / block, index dim]: pooled, normed, rotated keys
    pending      dtype [slots, WINDOW_ROWS, S*H]: trunk streams whose draft-layer cells are not written yet
    gathered     dtype [slots * WINDOW_ROWS, S*H]: room for those of several slots behind one another
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: what the layers compute in; kv_dtype: what K and V are held in, a float type or int8."""
        shapes = state_shapes(spec, num_slots=num_slots, max_context=max_context, kv_dtype=kv_dtype)
        self.capacity = key_capacity(max_context)
        self.device = device

        def make(name: str) -> Tensor:
            kind = state_dtype(name, dtype=dtype, kv_dtype=kv_dtype)
            # Zeros, not empty: masked cells are multiplied by 0, and 0 times NaN is NaN.
            return torch.zeros(shapes[name], dtype=kind, device=device)

        self.s = make("s")
        self.replay_k = make("replay_k")
        self.replay_delta = make("replay_delta")
        self.replay_factor = make("replay_factor")
        self.conv = make("conv")
        self.ple = make("ple")
        self.k = make("k")
        self.v = make("v")
        self.k_scale = make("k_scale") if "k_scale" in shapes else None
        self.v_scale = make("v_scale") if "v_scale" in shapes else None
        self.keys = KvCells(self.k, self.k_scale, dtype)
        self.values = KvCells(self.v, self.v_scale, dtype)
        self.index_ring = make("index_ring")
        self.index_blocks = make("index_blocks")
        self.pending = make("pending")
        self.gathered = make("gathered")
        self.conv_history = spec.gdn.conv_width - 1
        self.ple_history = spec.ple.history_rows if spec.ple else 0
        self.block_tokens = spec.qsa.block_tokens

    def begin(self, slot: int) -> None:
        """Make a slot fresh. K/V need no clearing: finite cells beyond a sequence's length count for nothing."""
        self.s[:, slot].zero_()
        self.conv[:, slot].zero_()
        self.ple[:, slot].zero_()

    def clear_kv(self, slot: int) -> None:
        """Make every K/V cell of a slot 0."""
        for tensor in self.kv_tensors():
            tensor[:, slot].zero_()

    def kv_tensors(self) -> tuple[Tensor, ...]:
        """All that holds K/V cells: each [layers, slots, kv heads, capacity, ...]."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        return tuple(x for x in tensors if x is not None)

    def put_ple_rows(self, layer: int, rows: Rows, normed: Tensor) -> Tensor:
        """Store the window's normed rows [B, T, S*H] of one PLE layer; returns [B, history+T, S*H]."""
        return _put_after_history(self.ple[layer], self.ple_history, rows.slots, normed)

    def keep_streams(self, slot: int, streams: Tensor) -> None:
        """The trunk's streams [T, S*H] of rows that were kept, T <= WINDOW_ROWS; nothing without a draft layer."""
        if self.pending.shape[0]:
            self.pending[slot, : streams.shape[0]] = streams

    def waiting(self, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The first streams that wait in each slot, slot after slot [R, S*H]; the next call overwrites them."""
        if len(slots) == 1:
            return self.pending[slots[0], : counts[0]]
        parts = [self.pending[slot, :count] for slot, count in zip(slots, counts, strict=True)]
        return torch.cat(parts, out=self.gathered[: sum(counts)])

    def commit(self, slot: int, num_rows: int) -> None:
        """Keep the first num_rows >= 1 rows of the slot's last window in S and both convolution histories."""
        for j in range(1, num_rows):
            s = self.s[:, slot]
            s.mul_(self.replay_factor[:, slot, j, :, None, None])
            s.add_(
                self.replay_k[:, slot, j].unsqueeze(-1)
                * self.replay_delta[:, slot, j].unsqueeze(-2)
            )
        _shift_history(self.conv[:, slot], self.conv_history, num_rows)
        if self.ple.shape[0]:
            _shift_history(self.ple[:, slot], self.ple_history, num_rows)


_FP32_STATE = frozenset({"s", "replay_k", "replay_delta", "replay_factor", "k_scale", "v_scale"})


def state_dtype(name: str, *, dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """Type of a tensor of SlotState by name."""
    if name in _FP32_STATE:
        return torch.float32
    return kv_dtype if name in ("k", "v") else dtype


def key_capacity(max_context: int) -> int:
    """K/V cells of a slot: the context and a window beyond it, to a multiple of KEY_TILE."""
    return -(-(max_context + WINDOW_ROWS) // KEY_TILE) * KEY_TILE


def state_shapes(
    spec: ModelSpec, *, num_slots: int, max_context: int, kv_dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of SlotState by name: the one place they are written, also for the memory plan."""
    num_gdn = len(spec.gdn_layers)
    num_kv = len(spec.qsa_layers) + spec.num_draft_layers
    num_ple = len(spec.ple.layer_ids) if spec.ple else 0
    num_drafting = num_slots if spec.num_draft_layers else 0
    ple_rows = (spec.ple.history_rows if spec.ple else 0) + WINDOW_ROWS
    gdn, qsa = spec.gdn, spec.qsa
    capacity = key_capacity(max_context)
    cells = (num_kv, num_slots, qsa.num_kv_heads, capacity)
    kv = (*cells, qsa.head_dim)
    scales = {"k_scale": cells, "v_scale": cells} if kv_dtype == torch.int8 else {}
    window = (num_gdn, num_slots, WINDOW_ROWS, gdn.num_value_heads)
    return {
        "s": (num_gdn, num_slots, gdn.num_value_heads, gdn.key_dim, gdn.value_dim),
        "replay_k": (*window, gdn.key_dim),
        "replay_delta": (*window, gdn.value_dim),
        "replay_factor": window,
        "conv": (num_gdn, num_slots, gdn.conv_width - 1 + WINDOW_ROWS, gdn.conv_channels),
        "ple": (num_ple, num_slots, ple_rows, spec.stream_width),
        "k": kv,
        "v": kv,
        **scales,
        "index_ring": (num_kv, num_slots, RING_ROWS, qsa.index_dim),
        "index_blocks": (num_kv, num_slots, -(-capacity // qsa.block_tokens), qsa.index_dim),
        "pending": (num_drafting, WINDOW_ROWS, spec.stream_width),
        "gathered": (num_drafting * WINDOW_ROWS, spec.stream_width),
    }


def _put_after_history(buffer: Tensor, history: int, slots: Sequence[int], rows: Tensor) -> Tensor:
    end = history + rows.shape[1]
    if len(slots) == 1:
        part = buffer[slots[0], :end].unsqueeze(0)
        part[:, history:] = rows
        return part
    at = list(slots)
    buffer[at, history:end] = rows
    return buffer[at, :end]


def _shift_history(buffer: Tensor, history: int, num_rows: int) -> None:
    buffer[:, :history] = buffer[:, num_rows : num_rows + history].clone()
