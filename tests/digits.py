"""Rows as fixed-point numbers of two int8 digits, in plain numpy: see engine/cuda/digits.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.cuda.quant import GROUP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.cuda.digits import Digits


def whole_numbers(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Runs [R, n] as whole numbers, and each run's unit over 16."""
    bits = x.view(np.int32)
    exponent = np.maximum((bits & 0x7FFFFFFF).max(1) >> 23, 18)
    unit = ((exponent - 17) << 23).astype(np.int32).view(np.float32)
    unit = np.where(exponent == 255, np.float32("nan"), unit)
    factor = ((267 - exponent) << 23).astype(np.int32).view(np.float32)
    shifted = x * factor[:, None] + np.float32(12582912.0)
    return (shifted.view(np.int32) - 0x4B400000).astype(np.int64), unit


def split_rows(x: Tensor, to: Digits) -> None:
    """Digits of x bf16 [R, K], one unit a group."""
    num_rows, num_columns = x.shape
    groups = to.units.shape[1]
    padded = np.zeros((num_rows, groups * GROUP), np.float32)
    padded[:, :num_columns] = x.float().cpu().numpy()
    whole, units = whole_numbers(padded.reshape(-1, GROUP))
    low = ((whole + 128) & 255) - 128
    digits = np.zeros((num_rows * groups, 2, GROUP), np.int8)
    c = np.arange(GROUP)
    place = c // (GROUP // 4) % 2 * (GROUP // 2) + c % (GROUP // 4) * 2 + c // (GROUP // 2)
    digits[:, 0, place], digits[:, 1, place] = (whole - low) >> 8, low
    rows = digits.reshape(num_rows, groups, 2, GROUP).transpose(0, 2, 1, 3)
    to.digits.copy_(torch.from_numpy(np.ascontiguousarray(rows)).view(num_rows, 2, -1))
    to.units.copy_(torch.from_numpy(units).view(num_rows, groups))
