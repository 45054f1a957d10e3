"""Experts in 4 bits: symmetric, one scale per GROUP input columns of a row. Plain torch; kernels read what this packs.

TILE rows of one group lie together, so that a program which walks along K reads one run of memory. A word holds four
weights of one group, QUARTER columns apart: nibble j of word w is column j * QUARTER + w of its group, in two's
complement. So the nibbles of consecutive words are consecutive columns, and a kernel multiplies a quarter at a time; or
it reads bytes, whose low and high nibbles are each half a group in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128
QUARTER = GROUP // 4
TILE = 64
_LEVELS = 7
_LOWEST = -8


@dataclass(frozen=True, slots=True)
class Packed4:
    """Quantised matrices [E, N, K], padded to whole tiles and groups.

    words int16 [E, N/TILE, K/GROUP, TILE, QUARTER]; scales bf16 [E, N/TILE, K/GROUP, TILE].
    """

    words: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of words and scales."""
        return self.words.numel() * 2 + self.scales.numel() * 2

    @property
    def num_groups(self) -> int:
        """Groups along K, padding included."""
        return self.words.shape[2]


def packed_shape(count: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """Shape of the scales of [count, rows, columns]; the words have QUARTER more."""
    return count, -(-rows // TILE), -(-columns // GROUP), TILE


def pack4(weight: Tensor) -> Packed4:
    """weight float [E, N, K] -> its nearest 4-bit form."""
    count, rows, columns = weight.shape
    _, tiles, num_groups, _ = packed_shape(count, rows, columns)
    missing = (0, num_groups * GROUP - columns, 0, tiles * TILE - rows)
    padded = F.pad(weight.to(torch.float32), missing)
    groups = padded.view(count, tiles, TILE, num_groups, GROUP).transpose(2, 3)
    scales = (groups.abs().amax(-1) / _LEVELS).to(torch.bfloat16)
    divisor = scales.to(torch.float32).clamp_min(1e-30).unsqueeze(-1)
    levels = (groups / divisor).round_().clamp_(_LOWEST, _LEVELS).to(torch.int32) & 15
    quarters = levels.unflatten(-1, (4, QUARTER))
    words = quarters[..., 0, :].clone()
    for j in range(1, 4):
        words |= quarters[..., j, :] << (4 * j)
    return Packed4(words=words.to(torch.int16).contiguous(), scales=scales.contiguous())


def unpack4(packed: Packed4, num_rows: int, num_columns: int) -> Tensor:
    """fp32 [E, num_rows, num_columns] of what `pack4` kept: the reference of every 4-bit kernel."""
    words = (packed.words.to(torch.int32) & 0xFFFF).unsqueeze(-2)
    shifts = torch.arange(0, 16, 4, device=words.device).view(4, 1)
    levels = ((((words >> shifts) & 15) ^ 8) - 8).flatten(-2)
    wide = levels.to(torch.float32) * packed.scales.to(torch.float32).unsqueeze(-1)
    count, tiles, groups, tile, width = wide.shape
    rows = wide.transpose(2, 3).reshape(count, tiles * tile, groups * width)
    return rows[:, :num_rows, :num_columns]
