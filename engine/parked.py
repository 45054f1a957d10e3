"""Parked state: what is kept of sequences that left their slot. Copies bytes by id; what to keep is decided elsewhere.

A *page* holds the cells of PAGE_TOKENS positions (K, V and index keys of every attention layer, the draft layer's too).
A *checkpoint* holds the running state at one position: S, convolution histories, raw index keys of the open block,
and the trunk's streams whose draft-layer cells are not written yet. Pages and a checkpoint at the same position
together are all that a sequence is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

from engine.arena import BlockArena
from engine.copy_lane import CopyLane, lane_for
from engine.errors import PlanError
from engine.interface import PAGE_TOKENS

if TYPE_CHECKING:
    from engine.state import SlotState

_STAGED_PAGES = 8
"""Pages that a device lays out at once; of the real model 14 MiB."""
_ALIGN_BYTES = 16
"""Parts begin at multiples of this, so that every dtype can be seen in place."""

Blocks = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMark:
    """Counters that go with a checkpoint's bytes."""

    num_computed: int
    num_draft_cells: int | None
    """None: the sequence never drafted."""


class ParkedStates:
    """Host memory for pages and checkpoints: a page is a block, a checkpoint as many blocks as it needs."""

    def __init__(
        self,
        state: SlotState,
        *,
        max_bytes: int | None = None,
        lane: CopyLane | None = None,
        staged_pages: int | None = None,
    ) -> None:
        """max_bytes: most host memory, None for no limit.

        staged_pages: pages that are laid out beside the slot before they are copied, so that a device has one copy a
        page and not one a part; None chooses by device, 1 copies the parts themselves.
        """
        self._state = state
        on_gpu = state.device.type == "cuda"
        self._staged_pages = staged_pages or (_STAGED_PAGES if on_gpu else 1)
        self._blocks_per_page = PAGE_TOKENS // state.block_tokens
        self._lane = lane_for(state.device) if lane is None else lane
        checkpoint_bytes = _padded_bytes(self._running(0))
        # Without an attention layer a page holds nothing, and a block is a checkpoint.
        block_bytes = _padded_bytes(self._cells(0, 0, 1)) or checkpoint_bytes
        self._arena = BlockArena(block_bytes, max_bytes, pin=on_gpu)
        self._blocks_per_checkpoint = self._arena.blocks_for(checkpoint_bytes)
        self._pages: dict[int, Blocks] = {}
        self._checkpoints: dict[int, Blocks] = {}
        self._marks: dict[int, CheckpointMark] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._arena.block_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: whole blocks."""
        return self._blocks_per_checkpoint * self._arena.block_bytes

    @property
    def blocks_per_checkpoint(self) -> int:
        """Of page_bytes each."""
        return self._blocks_per_checkpoint

    @property
    def held_bytes(self) -> int:
        """Host memory that is taken, used or not."""
        return self._arena.held_bytes

    def wait(self, slot: int) -> None:
        """Whatever is done with the slot from now on comes after the copies from and to it."""
        self._lane.wait(slot)

    def check_room(self, *, num_pages: int, num_checkpoints: int) -> None:
        """Raises PlanError unless so many more fit; what goes at the same time counts as less than none."""
        self._arena.check_room(num_pages + num_checkpoints * self._blocks_per_checkpoint)

    def memory(
        self, page_ids: Iterable[int], checkpoint_ids: Iterable[int]
    ) -> tuple[memoryview, ...]:
        """The blocks of pages and checkpoints as the host sees them; `fence` says when they are good."""
        pages = (self._pages[page_id] for page_id in page_ids)
        checkpoints = (self._checkpoints[checkpoint_id] for checkpoint_id in checkpoint_ids)
        blocks = chain.from_iterable(chain(pages, checkpoints))
        return tuple(block.numpy().data for block in blocks)

    def fence(self) -> Callable[[], None]:
        """A call, from any thread, that returns when all copies issued so far are done."""
        return self._lane.fence()

    def reserve(self, page_ids: Iterable[int], checkpoint_ids: Iterable[int]) -> None:
        """New pages and checkpoints without content; a checkpoint can be loaded once it has its mark."""
        for page_id in page_ids:
            self._pages[page_id] = self._arena.take(1)
        for checkpoint_id in checkpoint_ids:
            self._checkpoints[checkpoint_id] = self._arena.take(self._blocks_per_checkpoint)

    def set_mark(self, checkpoint_id: int, mark: CheckpointMark) -> None:
        """The content of a reserved checkpoint is there."""
        self._marks[checkpoint_id] = mark

    def save_pages(self, slot: int, pages: Sequence[tuple[int, int]]) -> None:
        """Copy the slot's cells [index * PAGE_TOKENS, ...) to new pages, given as (index, page id)."""
        for _, page_id in pages:
            self._pages[page_id] = self._arena.take(1)
        self._lane.run(slot, partial(self._copy_pages, slot, pages, to_blocks=True))

    def load_pages(self, slot: int, pages: Sequence[tuple[int, int]]) -> None:
        """Copy pages to the slot's cells [index * PAGE_TOKENS, ...), given as (index, page id)."""
        self._lane.run(slot, partial(self._copy_pages, slot, pages, to_blocks=False))

    def _copy_pages(self, slot: int, pages: Sequence[tuple[int, int]], *, to_blocks: bool) -> None:
        for run in _runs(sorted(pages), self._staged_pages):
            blocks = [self._pages[page_id][0] for _, page_id in run]
            parts = self._cells(slot, run[0][0], len(run))
            if self._staged_pages == 1:
                _copy(parts, (blocks[0],), to_blocks=to_blocks)
            else:
                self._copy_staged(parts, blocks, to_blocks=to_blocks)

    def _copy_staged(self, parts: list[Tensor], blocks: list[Tensor], *, to_blocks: bool) -> None:
        """By way of memory beside the slot that is laid out like the blocks: a copy a page between device and host."""
        count = len(blocks)
        stage = blocks[0].new_empty((count, self.page_bytes), device=self._state.device)
        if not to_blocks:
            for page, block in zip(stage, blocks, strict=True):
                page.copy_(block, non_blocking=True)
        # Pages follow each other in K, V and scales on the axis of cells, in index blocks on that of blocks.
        axes = [2] * (len(parts) - 1) + [1]
        for part, place in _places(parts, axes, stage):
            target, source = (place, part) if to_blocks else (part, place)
            target.copy_(source)
        if to_blocks:
            for page, block in zip(stage, blocks, strict=True):
                block.copy_(page, non_blocking=True)

    def save_checkpoint(self, checkpoint_id: int, slot: int, mark: CheckpointMark) -> None:
        """Copy the slot's running state to a new checkpoint."""
        blocks = self._arena.take(self._blocks_per_checkpoint)
        self._checkpoints[checkpoint_id], self._marks[checkpoint_id] = blocks, mark
        self._lane.run(slot, partial(_copy, self._running(slot), blocks, to_blocks=True))

    def load_checkpoint(self, checkpoint_id: int, slot: int) -> CheckpointMark:
        """Copy a checkpoint to the slot's running state."""
        parts, blocks = self._running(slot), self._checkpoints[checkpoint_id]
        self._lane.run(slot, partial(_copy, parts, blocks, to_blocks=False))
        return self._marks[checkpoint_id]

    def mark(self, checkpoint_id: int) -> CheckpointMark:
        """Counters of a checkpoint. Raises PlanError if there is none, or none with content."""
        if checkpoint_id not in self._marks:
            raise PlanError(f"checkpoint {checkpoint_id}: no such checkpoint is parked")
        return self._marks[checkpoint_id]

    def has_page(self, page_id: int) -> bool:
        """Whether a page is parked."""
        return page_id in self._pages

    def has_checkpoint(self, checkpoint_id: int) -> bool:
        """Whether a checkpoint is parked."""
        return checkpoint_id in self._checkpoints

    def drop_page(self, page_id: int) -> None:
        """Forget a page."""
        self._arena.give_back(self._pages.pop(page_id))

    def drop_checkpoint(self, checkpoint_id: int) -> None:
        """Forget a checkpoint."""
        self._arena.give_back(self._checkpoints.pop(checkpoint_id))
        self._marks.pop(checkpoint_id, None)

    def _cells(self, slot: int, index: int, count: int) -> list[Tensor]:
        """Of pages from `index` on: few parts, each spread over the slot's memory."""
        state, end = self._state, index + count
        cells = slice(index * PAGE_TOKENS, end * PAGE_TOKENS)
        blocks = slice(index * self._blocks_per_page, end * self._blocks_per_page)
        parts = [x[:, slot, :, cells] for x in state.kv_tensors()]
        return [*parts, state.index_blocks[:, slot, blocks]]

    def _running(self, slot: int) -> list[Tensor]:
        """Of one checkpoint: by layer, so that each part is contiguous and can be cut at the end of a block."""
        state = self._state
        parts = [
            *state.s[:, slot],
            *state.conv[:, slot, : state.conv_history],
            *state.ple[:, slot, : state.ple_history],
            *state.index_ring[:, slot],
        ]
        return [*parts, state.pending[slot]] if state.pending.shape[0] else parts


def _runs(pages: list[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Pages of rising index as runs without gaps, none longer than `most`."""
    run: list[tuple[int, int]] = []
    for page in pages:
        if run and (len(run) == most or page[0] != run[-1][0] + 1):
            yield run
            run = []
        run.append(page)
    if run:
        yield run


def _places(parts: list[Tensor], axes: list[int], stage: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of several pages, page by page, with their places in `stage` uint8 [pages, bytes]; axes: see caller."""
    count, at = stage.shape[0], 0
    for part, axis in zip(parts, axes, strict=True):
        paged = part.unflatten(axis, (count, -1)).movedim(axis, 0)
        num_bytes = part.nbytes // count
        yield paged, stage[:, at : at + num_bytes].view(part.dtype).view(paged.shape)
        at += _aligned(num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _padded_bytes(parts: list[Tensor]) -> int:
    return sum(_aligned(part.nbytes) for part in parts)


def _copy(parts: list[Tensor], blocks: Blocks, *, to_blocks: bool) -> None:
    """Parts one after the other, to blocks or from them."""
    for part, piece in _pieces(parts, blocks):
        target, source = (piece, part) if to_blocks else (part, piece)
        target.copy_(source, non_blocking=True)


def _pieces(parts: list[Tensor], blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
    """Every part, or piece of one that goes over the end of a block, with its place in the blocks."""
    block_bytes = blocks[0].numel()
    at = 0
    for part in parts:
        index, first = divmod(at, block_bytes)
        if first + part.nbytes <= block_bytes:
            yield part, blocks[index][first : first + part.nbytes].view(part.dtype).view(part.shape)
        else:
            flat, done = part.view(-1), 0
            while done < flat.numel():
                index, first = divmod(at + done * part.itemsize, block_bytes)
                count = min((block_bytes - first) // part.itemsize, flat.numel() - done)
                room = blocks[index][first : first + count * part.itemsize]
                yield flat[done : done + count], room.view(part.dtype)
                done += count
        at += _aligned(part.nbytes)
