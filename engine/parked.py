"""Parked state: what is kept of sequences that left their slot. Copies bytes by id; what to keep is decided elsewhere.

A *page* holds the cells of PAGE_TOKENS positions (K, V and index keys of every attention layer, the draft layer's too).
A *checkpoint* holds the running state at one position: S, convolution histories, raw index keys of the open block,
and the trunk's streams whose draft-layer cells are not written yet. Pages and a checkpoint at the same position
together are all that a sequence is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import PlanError
from engine.interface import PAGE_TOKENS

if TYPE_CHECKING:
    from engine.state import SlotState

_SLAB_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMark:
    """Counters that go with a checkpoint's bytes."""

    num_computed: int
    num_draft_cells: int | None
    """None: the sequence never drafted."""


class ParkedStates:
    """Host memory (pinned beside a CUDA device) for pages and checkpoints, allocated in slabs as needed.

    Slabs are reused and never given back, so memory follows the most that was ever parked.
    """

    def __init__(self, state: SlotState) -> None:
        self._state = state
        pin = state.device.type == "cuda"
        self._blocks_per_page = PAGE_TOKENS // state.block_tokens
        self._pages = _Arena(_row_bytes(self._cells(0, 0)), torch.uint8, pin)
        self._large = _Arena(state.s[:, 0].numel(), torch.float32, pin)
        self._rest = _Arena(_row_bytes(self._small(0)), torch.uint8, pin)
        self._marks: dict[int, CheckpointMark] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._pages.row_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return self._large.row_bytes + self._rest.row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(arena.held_bytes for arena in (self._pages, self._large, self._rest))

    def save_page(self, page_id: int, slot: int, index: int) -> None:
        """Copy the slot's cells [index * PAGE_TOKENS, ...) to a new page."""
        _pack(self._pages.take(page_id), self._cells(slot, index))

    def load_page(self, page_id: int, slot: int, index: int) -> None:
        """Copy a page to the slot's cells [index * PAGE_TOKENS, ...)."""
        _unpack(self._pages.row(page_id), self._cells(slot, index))

    def save_checkpoint(self, checkpoint_id: int, slot: int, mark: CheckpointMark) -> None:
        """Copy the slot's running state to a new checkpoint."""
        self._large.take(checkpoint_id).copy_(self._state.s[:, slot].reshape(-1), non_blocking=True)
        _pack(self._rest.take(checkpoint_id), self._small(slot))
        self._marks[checkpoint_id] = mark

    def load_checkpoint(self, checkpoint_id: int, slot: int) -> CheckpointMark:
        """Copy a checkpoint to the slot's running state."""
        s = self._state.s[:, slot]
        s.copy_(self._large.row(checkpoint_id).view(s.shape), non_blocking=True)
        _unpack(self._rest.row(checkpoint_id), self._small(slot))
        return self._marks[checkpoint_id]

    def mark(self, checkpoint_id: int) -> CheckpointMark:
        """Counters of a checkpoint. Raises PlanError if there is none."""
        if checkpoint_id not in self._marks:
            raise PlanError(f"checkpoint {checkpoint_id}: no such checkpoint is parked")
        return self._marks[checkpoint_id]

    def has_page(self, page_id: int) -> bool:
        """Whether a page is parked."""
        return self._pages.has(page_id)

    def has_checkpoint(self, checkpoint_id: int) -> bool:
        """Whether a checkpoint is parked."""
        return checkpoint_id in self._marks

    def drop_page(self, page_id: int) -> None:
        """Forget a page."""
        self._pages.give_back(page_id)

    def drop_checkpoint(self, checkpoint_id: int) -> None:
        """Forget a checkpoint."""
        self._large.give_back(checkpoint_id)
        self._rest.give_back(checkpoint_id)
        del self._marks[checkpoint_id]

    def _cells(self, slot: int, index: int) -> list[Tensor]:
        state = self._state
        cells = slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
        blocks = slice(index * self._blocks_per_page, (index + 1) * self._blocks_per_page)
        parts = [x[:, slot, :, cells] for x in state.kv_tensors()]
        parts.append(state.index_blocks[:, slot, blocks])
        return sorted(parts, key=lambda part: -part.element_size())

    def _small(self, slot: int) -> list[Tensor]:
        state = self._state
        parts = [
            state.conv[:, slot, : state.conv_history],
            state.ple[:, slot, : state.ple_history],
            state.index_ring[:, slot],
        ]
        return [*parts, state.pending[slot]] if state.pending.shape[0] else parts


class _Arena:
    """Rows of equal size by id, in slabs."""

    def __init__(self, num_elements: int, dtype: torch.dtype, pin: bool) -> None:
        self._num_elements = num_elements
        self._dtype = dtype
        self._pin = pin
        self.row_bytes = num_elements * dtype.itemsize
        self._per_slab = max(1, _SLAB_BYTES // max(1, self.row_bytes))
        self._slabs: list[Tensor] = []
        self._free: list[Tensor] = []
        self._rows: dict[int, Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return len(self._slabs) * self._per_slab * self.row_bytes

    def has(self, row_id: int) -> bool:
        return row_id in self._rows

    def row(self, row_id: int) -> Tensor:
        return self._rows[row_id]

    def take(self, row_id: int) -> Tensor:
        if not self._free:
            shape = (self._per_slab, self._num_elements)
            slab = torch.empty(shape, dtype=self._dtype, pin_memory=self._pin)
            self._slabs.append(slab)
            self._free.extend(slab.unbind(0))
        self._rows[row_id] = self._free.pop()
        return self._rows[row_id]

    def give_back(self, row_id: int) -> None:
        self._free.append(self._rows.pop(row_id))


def _row_bytes(parts: list[Tensor]) -> int:
    """Bytes of a row of these parts, up to a multiple of the widest element, where the next row may begin."""
    widest = max(part.element_size() for part in parts)
    return -(-sum(part.nbytes for part in parts) // widest) * widest


def _places(row: Tensor, parts: list[Tensor]) -> Iterator[Tensor]:
    """Where each part is kept in a row of bytes. Wider elements come first, so that every place is aligned."""
    at = 0
    for part in parts:
        yield row[at : at + part.nbytes].view(part.dtype).view(part.shape)
        at += part.nbytes


def _pack(row: Tensor, parts: list[Tensor]) -> None:
    for place, part in zip(_places(row, parts), parts, strict=True):
        place.copy_(part, non_blocking=True)


def _unpack(row: Tensor, parts: list[Tensor]) -> None:
    for place, part in zip(_places(row, parts), parts, strict=True):
        part.copy_(place, non_blocking=True)
