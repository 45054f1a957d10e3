"""A GPU's 4-bit experts on a CPU: the same bits, so that an expert may be computed where its weights lie."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.native.abi import PackedExpert

if TYPE_CHECKING:
    from engine.cuda.quant import Packed4
    from engine.native.abi import Library


def expert_parts(
    library: Library, gate_up: Packed4, down: Packed4, expert: int, x: Tensor, width: int
) -> Tensor:
    """fp32 [R, H]: what one expert makes of rows x bf16 [R, H], before the router's weight.

    gate_up, down: in host memory, as engine.cuda.moe.MoeWeights describes them; width: columns between the two.
    Runs on the calling thread and lets others run. Raises MemoryError.
    """
    num_rows, hidden = x.shape
    parts = torch.empty(num_rows, hidden)
    rows = x.contiguous()
    failed = library.expert4(
        ctypes.byref(_one(gate_up, expert)),
        ctypes.byref(_one(down, expert)),
        rows.data_ptr(),
        num_rows,
        hidden,
        width,
        parts.data_ptr(),
    )
    if failed:
        raise MemoryError(f"an expert's buffers for {num_rows} rows")
    return parts


def _one(packed: Packed4, expert: int) -> PackedExpert:
    words, scales = packed.words[expert], packed.scales[expert]
    return PackedExpert(
        words.data_ptr(), scales.data_ptr(), packed.num_groups, packed.words.shape[1]
    )
