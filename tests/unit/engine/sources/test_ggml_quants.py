"""Dequantisation against the gguf library, bit for bit, on random blocks of every type."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import WeightMismatch
from engine.sources import ggml_types as types
from engine.sources.ggml_quants import dequantize, from_scaled
from engine.sources.ggml_types import TYPES, GgmlType

LIBRARY = [t for t in TYPES.values() if t not in (types.Q2_0, types.I8_ROW)]
QUANTISED = [t for t in LIBRARY if t.block_values > 1]
# Where the fp16 factors of a block lie.
HALVES = {
    types.Q4_K: (0, 2),
    types.Q5_K: (0, 2),
    types.Q6_K: (208,),
}


def random_blocks(kind: GgmlType, count: int) -> Tensor:
    """Every byte random, except that the fp16 factors are finite, some of them denormal, zero or negative."""
    generator = torch.Generator().manual_seed(kind.number)
    blocks = torch.randint(
        0, 256, (count, kind.block_bytes), dtype=torch.uint8, generator=generator
    )
    factors = torch.randn(count, generator=generator) * 10.0 ** torch.randint(
        -7, 3, (count,), generator=generator
    )
    factors[::17] = 0.0
    for at in HALVES.get(kind, (0,)):
        blocks[:, at : at + 2] = factors.to(torch.float16).view(-1, 1).view(torch.uint8)
    return blocks


def library(kind: GgmlType, blocks: Tensor) -> np.ndarray:
    return gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(kind.number))


def test_sizes_are_those_of_the_library() -> None:
    for kind in LIBRARY:
        number = gguf.GGMLQuantizationType(kind.number)
        assert gguf.GGML_QUANT_SIZES[number] == (kind.block_values, kind.block_bytes)
        assert number.name == kind.name


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda t: t.name)
def test_values_have_the_bits_of_the_library(kind: GgmlType) -> None:
    blocks = random_blocks(kind, 700)
    shape = (7, 100 * kind.block_values)
    found = dequantize(kind, blocks.flatten(), shape, "w")
    assert found.shape == shape
    expected = library(kind, blocks).reshape(shape)
    assert np.array_equal(found.numpy().view(np.int32), expected.view(np.int32))


def test_long_tensors_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(types.Q4_K, 50).flatten()
    whole = dequantize(types.Q4_K, blocks, (50, 256), "w")
    monkeypatch.setattr("engine.sources.ggml_quants._BLOCKS_AT_A_TIME", 7)
    assert torch.equal(dequantize(types.Q4_K, blocks, (50, 256), "w"), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_come_as_stored_wherever_they_lie(dtype: torch.dtype) -> None:
    kind = {torch.float32: types.F32, torch.float16: types.F16, torch.bfloat16: types.BF16}[dtype]
    values = torch.randn(3, 5).to(dtype)
    data = values.view(-1).view(torch.uint8)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), data))[1:]
    for stored in (data, shifted):
        found = dequantize(kind, stored, (3, 5), "w")
        assert found.dtype == dtype
        assert torch.equal(found, values)


@pytest.mark.parametrize("kind", [types.Q4_0, types.Q5_0, types.Q8_0, types.IQ4_NL])
def test_scales_apart_and_widened_change_no_value(kind: GgmlType) -> None:
    blocks = random_blocks(kind, 100)
    scales = blocks[:, :2].contiguous().view(torch.float16).view(-1)
    expected = dequantize(kind, blocks.flatten(), (100, 32), "w")
    for held in (scales, scales.to(torch.float32)):
        assert torch.equal(from_scaled(kind, held, blocks[:, 2:]), expected)


def test_rows_of_int8_times_their_scales() -> None:
    codes = torch.tensor([[1, -2, 3], [127, 0, -128]], dtype=torch.int8)
    scales = torch.tensor([0.3, 0.7])
    data = torch.cat((codes.view(torch.uint8).flatten(), scales.view(torch.uint8)))
    found = dequantize(types.I8_ROW, data, (2, 3), "w")
    assert torch.equal(found, codes.to(torch.float32) * scales[:, None])


def test_bytes_that_the_type_does_not_make_are_refused() -> None:
    data = torch.zeros(35, dtype=torch.uint8)
    with pytest.raises(WeightMismatch, match=r"w: found 35 bytes, required 34 for Q8_0 \[1, 32\]"):
        dequantize(types.Q8_0, data, (1, 32), "w")
    with pytest.raises(WeightMismatch, match="Q8_0: found rows of 33 values, required a multiple"):
        dequantize(types.Q8_0, data, (1, 33), "w")
    with pytest.raises(WeightMismatch, match="w: found Q2_0, which the gguf library cannot read"):
        dequantize(types.Q2_0, torch.zeros(18, dtype=torch.uint8), (1, 64), "w")
    with pytest.raises(WeightMismatch, match="w: found GGML type 3, required one of 0 F32"):
        types.ggml_type(3, "w")
