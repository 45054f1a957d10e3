"""Experts in 4 bits: symmetric, one scale per GROUP input columns of a row. Plain torch; kernels read what this packs.

A word holds four weights of one group, QUARTER columns apart: nibble j of word w is column j * QUARTER + w of its
group. So the nibbles of consecutive words are consecutive columns, and a kernel multiplies a quarter at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128
QUARTER = GROUP // 4
_LEVELS = 7
_BIAS = 8


@dataclass(frozen=True, slots=True)
class Packed4:
    """Quantised matrices. words int16 [E, N, K/4], scales bf16 [E, N, K/GROUP]; K is padded to whole groups."""

    words: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of words and scales."""
        return self.words.numel() * 2 + self.scales.numel() * 2

    @property
    def padded_in(self) -> int:
        """Input columns, padding included."""
        return self.words.shape[-1] * 4


def padded_columns(width: int) -> int:
    """Columns as packed."""
    return -(-width // GROUP) * GROUP


def pack4(weight: Tensor) -> Packed4:
    """weight float [E, N, K] -> its nearest 4-bit form."""
    padded = F.pad(weight.to(torch.float32), (0, padded_columns(weight.shape[-1]) - weight.shape[-1]))
    groups = padded.unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / _LEVELS).to(torch.bfloat16)
    divisor = scales.to(torch.float32).clamp_min(1e-30).unsqueeze(-1)
    levels = (groups / divisor).round().clamp(-_BIAS, _LEVELS).to(torch.int32) + _BIAS
    quarters = levels.unflatten(-1, (4, QUARTER))
    words = quarters[..., 0, :].clone()
    for j in range(1, 4):
        words |= quarters[..., j, :] << (4 * j)
    return Packed4(words=words.to(torch.int16).flatten(-2), scales=scales)


def unpack4(packed: Packed4, num_columns: int) -> Tensor:
    """fp32 [E, N, num_columns] of what `pack4` kept: the reference of every 4-bit kernel."""
    words = (packed.words.to(torch.int32) & 0xFFFF).unflatten(-1, (-1, 1, QUARTER))
    shifts = torch.arange(0, 16, 4, device=words.device).view(4, 1)
    levels = ((words >> shifts) & 15) - _BIAS
    wide = levels.flatten(-2).to(torch.float32) * packed.scales.to(torch.float32).unsqueeze(-1)
    return wide.flatten(-2)[..., :num_columns]
