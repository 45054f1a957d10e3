"""int8 cells: the error of every element, rounding, and vectors that have no scale of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kv_cells import MAX_CODE, KvCells, dequantize, quantize

DIVISION = MAX_CODE * 2.0**-24
"""By how much of a scale the rounding of a division can move a value across the middle between two codes."""


def assert_within_half_a_step(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    exact = codes.double() * scale.double().unsqueeze(-1)
    error = (x.double() - exact).abs()
    assert bool((error <= scale.double().unsqueeze(-1) * (0.5 + DIVISION)).all())


@given(
    seed=st.integers(0, 2**32),
    magnitude=st.floats(-30, 30),
    spread=st.floats(0, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_no_element_is_off_by_more_than_half_a_step(
    seed: int, magnitude: float, spread: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** (magnitude + spread * torch.randn(7, 1, generator=generator) / 3)
    x = (torch.randn(7, 33, generator=generator) * size).clamp(-3e38, 3e38).to(dtype)
    codes, scale = quantize(x)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert_within_half_a_step(x, codes, scale)
    # The whole range of codes is used, evenly to both sides, and never -128.
    assert codes.abs().amax(-1).tolist() == [MAX_CODE] * 7


def test_halves_go_to_the_even_code() -> None:
    codes, scale = quantize(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]))
    assert float(scale) == 1.0
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_a_vector_of_zeros_stays_one() -> None:
    codes, scale = quantize(torch.zeros(2, 3, 16))
    # Not 0: nothing is divided by 0, whose codes would be undefined.
    assert bool((scale > 0).all())
    assert torch.equal(dequantize(codes, scale, torch.float32), torch.zeros(2, 3, 16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_and_spoils_its_own_cell_only(bad: float) -> None:
    x = torch.ones(3, 8)
    x[1, 5] = bad
    read = dequantize(*quantize(x), torch.float32)
    assert torch.equal(read[[0, 2]], x[[0, 2]])
    assert not bool(torch.isfinite(read[1]).any())


def test_a_cell_is_the_same_in_any_company_and_place() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 2, 12, generator=generator)
    codes, scale = quantize(x)
    for first, end in ((0, 1), (3, 8), (7, 20)):
        part = x[first:end].transpose(0, 1)
        assert torch.equal(quantize(part)[0], codes[first:end].transpose(0, 1))
        assert torch.equal(quantize(part)[1], scale[first:end].transpose(0, 1))


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.int8])
def test_pieces_and_rows_write_and_read_the_same_cells(held: torch.dtype) -> None:
    """Layers 2, slots 3, heads 2, capacity 8, D 4."""
    shape = (2, 3, 2, 8, 4)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 2, 4, generator=generator)

    def empty() -> KvCells:
        scale = torch.zeros(shape[:-1]) if held == torch.int8 else None
        return KvCells(torch.zeros(shape, dtype=held), scale, torch.float32)

    by_piece, by_rows = empty(), empty()
    by_piece.write((1, 2, slice(None), slice(3, 8)), x.transpose(0, 1))
    for order in ([4, 0], [2, 1, 3]):
        position = torch.tensor(order)
        slot = torch.full_like(position, 2)
        by_rows.write((1, slot, slice(None), position + 3), x[position])
    assert torch.equal(by_piece.held, by_rows.held)
    if by_piece.scale is not None and by_rows.scale is not None:
        assert torch.equal(by_piece.scale, by_rows.scale)
        assert by_piece.scale.count_nonzero() == 10
    read = by_piece.read((1, 2, slice(None), slice(8)))
    cells = (torch.arange(2) + 2 * 2).unsqueeze(-1) * 8 + torch.arange(8)
    assert torch.equal(by_rows.gather(1, cells.flatten()).view(2, 8, 4), read)
    assert torch.equal(read[:, :3], torch.zeros(2, 3, 4))
    torch.testing.assert_close(read[:, 3:], x.transpose(0, 1), atol=0.02, rtol=0)
