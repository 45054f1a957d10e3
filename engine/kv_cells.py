"""K/V cells: how the vectors of keys and values are held between being written and being read.

In a float type they are held as they come. In int8 every vector of one head has a scale of its own: symmetric, round
to nearest even, scale = largest magnitude / 127, code = x / scale. That is elementwise but for an exact maximum, so a
cell depends on its vector alone, whoever writes it and in whatever company.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CODE = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A vector of zeros gets this one: its codes are 0 without a division by 0."""

CellIndex = tuple[int, int | Tensor, slice, slice | Tensor]
"""Layer, slot or slots, all heads, cells."""


@dataclass(frozen=True, slots=True)
class KvCells:
    """The cells of K or of V, of all layers and slots.

    held: [layers, slots, kv heads, capacity, D]; scale: fp32 [layers, slots, kv heads, capacity], None unless held is
    int8; dtype: what the cells are read as.
    """

    held: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    def write(self, at: CellIndex, x: Tensor) -> None:
        """Fill the cells at an index with x, of the shape that the index picks."""
        if self.scale is None:
            self.held[at] = x.to(self.held.dtype)
        else:
            self.held[at], self.scale[at] = quantize(x)

    def read(self, at: CellIndex) -> Tensor:
        """The cells at an index: without a copy where they are held as they are read."""
        return self._as_read(self.held[at], None if self.scale is None else self.scale[at])

    def gather(self, layer: int, cells: Tensor) -> Tensor:
        """Chosen cells [n, D] of a layer; cells: int64 [n], counted through slots, heads and capacity."""
        held = self.held[layer].flatten(0, 2).index_select(0, cells)
        if self.scale is None:
            return self._as_read(held, None)
        return self._as_read(held, self.scale[layer].flatten().index_select(0, cells))

    def _as_read(self, held: Tensor, scale: Tensor | None) -> Tensor:
        return held.to(self.dtype) if scale is None else dequantize(held, scale, self.dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] of any float type -> int8 codes [..., D] and fp32 scales [...].

    |x - code * scale| <= scale / 2, up to the rounding of the division. A vector that is not finite gets a scale that
    is not: what reads the cell is not finite either, and that is noticed.
    """
    wide = x.to(torch.float32)
    scale = (wide.abs().amax(-1) / MAX_CODE).clamp_min(_SMALLEST_SCALE)
    return (wide / scale.unsqueeze(-1)).round_().to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes int8 [..., D], scale fp32 [...] -> [..., D]: their product in fp32, rounded to `dtype`."""
    return (codes * scale.unsqueeze(-1)).to(dtype)
