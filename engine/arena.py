"""Host memory in blocks of one size: what pages and checkpoints are kept in, and never more than the limit.

Blocks come in slabs as they are needed, pinned beside a CUDA device. A block that is given back serves whoever asks
next, so memory follows the most that was ever kept at once.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from engine.errors import KernelFailure, PlanError

_SLAB_BYTES = 16 << 20


class BlockArena:
    """Blocks of `block_bytes`; at most `max_bytes` of them, slabs included (None: no limit)."""

    def __init__(self, block_bytes: int, max_bytes: int | None, *, pin: bool) -> None:
        self.block_bytes = block_bytes
        self._max_blocks = None if max_bytes is None else max_bytes // block_bytes
        self._pin = pin
        self._slabs: list[Tensor] = []
        self._num_blocks = 0
        self._free: list[Tensor] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._num_blocks * self.block_bytes

    def blocks_for(self, num_bytes: int) -> int:
        """How many blocks so many bytes take."""
        return -(-num_bytes // self.block_bytes)

    def check_room(self, num_blocks: int) -> None:
        """Raises PlanError unless so many blocks more than are used now can be taken."""
        num_used = self._num_blocks - len(self._free)
        if self._max_blocks is not None and num_used + num_blocks > self._max_blocks:
            raise PlanError(
                f"parking: {num_used} blocks of {self.block_bytes} bytes are used, {num_blocks} more are needed, "
                f"{self._max_blocks} is the limit"
            )

    def take(self, num_blocks: int) -> tuple[Tensor, ...]:
        """Blocks, uint8 [block_bytes] each, of any content; `check_room` said that they are there."""
        while len(self._free) < num_blocks:
            self._grow()
        taken = self._free[len(self._free) - num_blocks :]
        del self._free[len(self._free) - num_blocks :]
        return tuple(taken)

    def give_back(self, blocks: tuple[Tensor, ...]) -> None:
        """Blocks that nobody uses any more."""
        self._free.extend(blocks)

    def _grow(self) -> None:
        num_blocks = max(1, _SLAB_BYTES // self.block_bytes)
        if self._max_blocks is not None:
            num_blocks = min(num_blocks, self._max_blocks - self._num_blocks)
        assert num_blocks > 0, "blocks are taken beyond the limit"
        slab = torch.empty((num_blocks, self.block_bytes), dtype=torch.uint8)
        if self._pin:
            pin_memory(slab)
        self._slabs.append(slab)
        self._num_blocks += num_blocks
        self._free.extend(slab.unbind(0))


def pin_memory(slab: Tensor) -> None:
    """Page-lock a tensor where it is: torch's own pinned memory would be rounded up to a power of two.

    It is given free when `slab` itself is gone; whoever uses its memory holds it.
    """
    runtime = torch.cuda.cudart()
    assert runtime is not None
    error = runtime.cudaHostRegister(slab.data_ptr(), slab.nbytes, 0)
    if int(error) != 0:
        raise KernelFailure(
            f"{slab.nbytes} bytes of host memory cannot be pinned: CUDA error {int(error)}"
        )
    # Memory that went back to the system pinned could not be pinned again at the same address.
    weakref.finalize(slab, runtime.cudaHostUnregister, slab.data_ptr()).atexit = False
