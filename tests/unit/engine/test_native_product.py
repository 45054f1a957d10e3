"""Products: in tiles exact sums of a row's digits, else one chain an element, whatever shape, company and vectors."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.native import abi
from engine.native.weights import pack

needs_tiles = pytest.mark.skipif(not abi.has_tiles(), reason="needs a processor with AMX")
SHAPES = [(1, 1), (16, 64), (17, 63), (40, 65), (33, 130), (80, 384), (129, 40), (384, 96)]
NUM_ROWS = (*range(1, 21), 48, 53)
MOST = np.float32(127 * 65536)
_ALIGNMENT = 64
_DTYPES = {abi.KIND_F32: torch.float32, abi.KIND_BF16: torch.bfloat16}


def aligned(num_bytes: int) -> Tensor:
    """uint8 zeros that begin with a cache line; a tile may reach a KiB beyond."""
    memory = torch.zeros(num_bytes + _ALIGNMENT + 1024, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _ALIGNMENT :]


class Product:
    """A weight [n, k] as codes and scales, and what multiplies with it. Of other kinds the codes are the values."""

    def __init__(self, n: int, k: int, kind: int, code: int | None = None) -> None:
        """code: every one of the weight; None for random ones."""
        made = torch.Generator().manual_seed(n * 1000 + k)
        self.codes = torch.randint(-128, 128, (n, k), generator=made).to(torch.int8)
        if code is not None:
            self.codes.fill_(code)
        self.scales = torch.rand(n, generator=made) * 0.02 + 1e-4
        values = self.codes.to(_DTYPES.get(kind, torch.int8))
        packed = pack(values.unsqueeze(0), kind).contiguous().view(torch.uint8).flatten()
        self._data = aligned(packed.numel())
        self._data[: packed.numel()] = packed
        self._scales = torch.nn.functional.pad(self.scales, (0, -n % abi.PANEL))
        self._matrix = abi.Matrix(
            data=self._data.data_ptr(), scale=self._scales.data_ptr(), kind=kind, n=n, k=k
        )
        self._library = abi.Library(abi.LIBRARY)

    def __call__(self, x: Tensor, *, wide: bool = True) -> Tensor:
        """x: fp32 [R, k] -> fp32 [R, n]; wide: by the widest vectors that the processor has."""
        num_rows, matrix = x.shape[0], ctypes.byref(self._matrix)
        digits = aligned(4 * self._library.product_floats(matrix, num_rows))
        digits.fill_(0xFF)  # what an unused row leaves there must not matter
        tiled = self._matrix.kind == abi.KIND_TILES
        x, y = x.contiguous(), torch.full((num_rows, self._matrix.n), math.nan)
        at = digits.data_ptr() if tiled else None
        self._library.product(matrix, x.data_ptr(), num_rows, int(wide), at, y.data_ptr())
        return y

    def in_float64(self, x: Tensor) -> Tensor:
        return x.double() @ (self.codes.double() * self.scales.double().unsqueeze(1)).T


def rows(num_rows: int, k: int, seed: int = 1) -> Tensor:
    """Rows of many magnitudes."""
    made = torch.Generator().manual_seed(seed)
    size = 10.0 ** (torch.arange(num_rows) % 9 - 4).float()
    return torch.randn(num_rows, k, generator=made) * size.unsqueeze(1)


def by_digits(product: Product, x: Tensor) -> NDArray[np.float32]:
    """What the tiles compute, from whole numbers and single roundings: a fused multiply-add is exact in float64."""
    values = x.numpy()
    largest = np.maximum(np.abs(values).max(axis=1, keepdims=True), np.float32(2.0**-100))
    scale = (largest * (np.float32(1) / MOST)).astype(np.float32)
    whole = np.rint(values * (np.float32(1) / scale)).astype(np.int64)
    sums: list[NDArray[np.float64]] = []
    for _ in range(3):
        digit = (whole + 128) % 256 - 128
        whole = (whole - digit) // 256
        sums.append((digit @ product.codes.numpy().T.astype(np.int64)).astype(np.float32) * 1.0)
    joined = (sums[1].astype(np.float64) * 256 + sums[0]).astype(np.float32)
    joined = (sums[2].astype(np.float64) * 65536 + joined).astype(np.float32)
    return joined * product.scales.numpy() * scale


@needs_tiles
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_sums_are_exact(n: int, k: int) -> None:
    product = Product(n, k, abi.KIND_TILES)
    for num_rows in NUM_ROWS:
        x = rows(num_rows, k)
        assert np.array_equal(product(x).numpy(), by_digits(product, x))


@needs_tiles
@pytest.mark.parametrize("kind", [abi.KIND_I8, abi.KIND_TILES])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_both_arithmetics_are_near_the_product_in_float64(n: int, k: int, kind: int) -> None:
    product = Product(n, k, kind)
    x = rows(53, k)
    found, wide = product(x).double(), product.in_float64(x)
    largest = x.double().abs().amax(1, keepdim=True)
    weight = (product.codes.double() * product.scales.double().unsqueeze(1)).abs().sum(1)
    assert ((found - wide).abs() <= 2.0**-22 * largest * weight + 2.0**-21 * wide.abs()).all()


@needs_tiles
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_in_any_company(n: int, k: int) -> None:
    product = Product(n, k, abi.KIND_TILES)
    x = rows(max(NUM_ROWS), k)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x])
    for num_rows in NUM_ROWS:
        assert torch.equal(product(x[-num_rows:]), alone[-num_rows:])


@pytest.mark.parametrize("kind", [abi.KIND_F32, abi.KIND_BF16, abi.KIND_I8])
@pytest.mark.parametrize(("n", "k"), [(4, 130), *SHAPES])
def test_vectors_of_any_width_give_the_same_bits_in_any_company(n: int, k: int, kind: int) -> None:
    product = Product(n, k, kind)
    x = rows(max(NUM_ROWS), k)
    alone = torch.cat([product(row.unsqueeze(0), wide=False) for row in x])
    for num_rows in NUM_ROWS:
        for wide in (False, True):
            assert torch.equal(product(x[-num_rows:], wide=wide), alone[-num_rows:])


@needs_tiles
def test_rows_of_zeros_and_of_extreme_values() -> None:
    product = Product(40, 65, abi.KIND_TILES)
    x = rows(6, 65)
    x[1] = 0.0
    x[2] *= 1e30
    x[3] = 3e38 * x[3].sign()
    x[4] *= 1e-35
    x[5] = 1e-42  # flushed to zero where denormals are
    found, wide = product(x).double(), product.in_float64(x)
    assert (found[1] == 0.0).all()
    largest = x.double().abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    weight = (product.codes.double() * product.scales.double().unsqueeze(1)).abs().sum(1)
    near = (found - wide).abs() <= 2.0**-22 * largest * weight + 2.0**-21 * wide.abs()
    assert (near | ~wide.float().isfinite()).all()


@needs_tiles
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 64])
def test_a_row_that_is_not_finite_has_no_finite_product_and_harms_no_other(
    bad: float, at: int
) -> None:
    product = Product(40, 65, abi.KIND_TILES)
    x = rows(7, 65)
    clean = product(x)
    x[2, at] = bad
    found = product(x)
    assert not found[2].isfinite().any()
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(found[others], clean[others])


@needs_tiles
def test_the_longest_row_that_fits_the_sums() -> None:
    product = Product(2, abi.MAX_TILE_K, abi.KIND_TILES, code=-128)
    # Digits of -128 in the lower places, the largest in the highest.
    x = torch.full((1, abi.MAX_TILE_K), 127 * 65536.0 - 65536.0 - 128 * 257.0)
    x[0, 0] = 127 * 65536.0
    found, wide = product(x).double(), product.in_float64(x)
    torch.testing.assert_close(found, wide, rtol=1e-6, atol=0.0)
