"""The pool's 4-bit experts to the bit against the arithmetic as written; tests/gpu holds the kernels against it."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cuda.pool import FarPool, PoolBuffers
from engine.cuda.quant import GROUP, pack4, unpack4
from engine.cuda.random_model import real_spec
from engine.cuda.tiers import ExpertPlaces, TradeRoom, trade_places
from engine.native.abi import why_unavailable
from tests.digits import whole_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.cuda.quant import Packed4

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

SHAPES = [(96, 40), (300, 200), (256, 128), (1, 1), (520, 90)]
"""Hidden size and width of an expert: whole tiles and groups, and parts of them."""
CPU = torch.device("cpu")
NUM_EXPERTS, TOP = 7, 3

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fmaf.restype = ctypes.c_float
_libm.fmaf.argtypes = [ctypes.c_float] * 3
_fmaf = np.frompyfunc(_libm.fmaf, 3, 1)


def fma(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    return np.asarray(_fmaf(a, b, c), dtype=np.float32)


def levels_of(packed: Packed4, expert: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Whole weights [rows, columns], padding included, and scales [rows, groups]."""
    words, scales = packed.words[expert : expert + 1], packed.scales[expert]
    ones = type(packed)(words=words, scales=torch.ones_like(packed.scales[expert : expert + 1]))
    tiles, groups, tile = scales.shape
    levels = unpack4(ones, tiles * tile, groups * GROUP)[0].numpy().astype(np.int64)
    return levels, scales.transpose(1, 2).reshape(tiles * tile, groups).float().numpy()


def multiply(
    packed: Packed4, expert: int, x: NDArray[np.float32], runs: int
) -> NDArray[np.float32]:
    """fp32 [R, rows]: runs of columns added up in their order, one rounding each."""
    levels, scales = levels_of(packed, expert)
    padded = np.zeros((x.shape[0], levels.shape[1]), np.float32)
    padded[:, : x.shape[1]] = x
    total = np.zeros((x.shape[0], levels.shape[0]), np.float32)
    for run in range(scales.shape[1] * runs):
        group = run // runs
        columns = np.arange(group * GROUP, (group + 1) * GROUP)
        if runs == 2:
            columns = columns[np.arange(GROUP) // (GROUP // 4) % 2 == run % 2]
        whole, unit = whole_numbers(np.ascontiguousarray(padded[:, columns]))
        sums = (whole @ levels[:, columns].T * 16).astype(np.float32)
        total = fma(sums, scales[None, :, group] * unit[:, None], total)
    return total


def silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    def c(value: float) -> np.float32:
        return np.float32(value)

    y = -x
    y = np.where(y < c(-87.33654), c(-87.33654), y)
    y = np.where(y > c(88.3), c(88.3), y)
    shifted = fma(y, c(1.44269504), c(12582912.0))
    n = shifted - c(12582912.0)
    r = fma(n, c(2.12194440e-4), fma(n, c(-0.693359375), y))
    p = np.full_like(r, c(1.9875691e-4))
    for factor in (1.3981999e-3, 8.3334519e-3, 4.1665795e-2, 1.6666666e-1, 5.0000000e-1):
        p = fma(p, r, c(factor))
    p = fma(p, r * r, r + c(1.0))
    power = (shifted.view(np.int32) - (0x4B400000 - 127)) << 23
    return (x * (c(1.0) / (c(1.0) + p * power.view(np.float32)))).astype(np.float32)


class Layer:
    """Experts of one layer, all but some in host memory, and rows that chose among all."""

    def __init__(self, hidden: int, width: int, near: tuple[int, ...] = (2,)) -> None:
        self.spec = real_spec(
            hidden_size=hidden,
            moe_intermediate_size=width,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP,
            num_hidden_layers=1,
            ple_layer_ids=None,
        )
        generator = torch.Generator().manual_seed(hidden + width)
        up = torch.randn(NUM_EXPERTS, 2 * width, hidden, generator=generator) * hidden**-0.5
        down = torch.randn(NUM_EXPERTS, hidden, width, generator=generator) * width**-0.5
        self.gate_up, self.down = pack4(up), pack4(down)
        places = ExpertPlaces(self.spec, near, CPU)
        places.open_host()
        for e in range(NUM_EXPERTS):
            places.put(e, pack4(up[e : e + 1]), pack4(down[e : e + 1]))
        self.slots, self.far = places.slots, places.far()
        self.near = near
        self.x = (torch.randn(64, hidden, generator=generator) * 2).to(torch.bfloat16)
        order = torch.rand(64, NUM_EXPERTS, generator=generator).argsort(1)
        self.ids = order[:, :TOP].to(torch.int32)

    def pool(self, workers: int = 1, *, wide: bool = True, max_rows: int = 64) -> FarPool:
        return FarPool(self.spec, [self.far], max_rows, CPU, workers, wide=wide)

    def parts(self, rows: slice, pool: FarPool | None = None) -> Tensor:
        """[R, TOP, H] as the pool leaves it: NaN where it has nothing to do with."""
        pool = pool or self.pool()
        count = self.ids[rows].shape[0]
        buffers = pool.buffers
        buffers.parts.fill_(float("nan"))
        buffers.x[:count].copy_(self.x[rows])
        buffers.ids.fill_(0)
        buffers.ids[:count].copy_(self.ids[rows])
        pool.compute(self.far, count)
        assert bool(buffers.parts[count:].isnan().all())
        return buffers.parts[:count].clone()

    def wanted(self, rows: slice) -> Tensor:
        """The same by the arithmetic as written."""
        x, ids = self.x[rows].float().numpy(), self.ids[rows]
        parts = torch.full((*ids.shape, self.spec.hidden), float("nan"))
        width = self.spec.moe.expert_dim
        for expert in set(range(NUM_EXPERTS)) - set(self.near):
            chose = (ids == expert).any(1)
            if not bool(chose.any()):
                continue
            both = multiply(self.gate_up, expert, x[chose.numpy()], 1)[:, : 2 * width]
            middle = silu(np.ascontiguousarray(both[:, 0::2])) * both[:, 1::2]
            out = multiply(self.down, expert, middle, 2)[:, : self.spec.hidden]
            parts[ids == expert] = torch.from_numpy(out)
        return parts


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit; what is no number is none in both."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.fixture(autouse=True)
def _denormals() -> None:  # pyright: ignore[reportUnusedFunction]
    # An engine that was loaded in this process flushes them, which the pool must not do, nor the comparison.
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
def test_parts_have_the_bits_of_the_arithmetic_as_written(
    hidden: int, width: int, wide: bool
) -> None:
    layer = Layer(hidden, width)
    parts = layer.parts(slice(0, 5), layer.pool(wide=wide))
    assert same(parts, layer.wanted(slice(0, 5)))
    near = layer.ids[:5] == 2
    assert bool(parts[~near].isfinite().all()) and bool(parts[near].isnan().all())


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])
def test_threads_company_and_vectors_change_no_bit(workers: int, wide: bool) -> None:
    """Of 1 to 64 rows, so that an expert has more rows than are multiplied at once."""
    layer = Layer(300, 200)
    alone = layer.pool()
    each = torch.cat([layer.parts(slice(r, r + 1), alone) for r in range(64)])
    pool = layer.pool(workers, wide=wide)
    assert pool.num_workers == workers
    for count in (64, 1, 20, 37, 2):
        assert same(layer.parts(slice(0, count), pool), each[:count])


def test_one_expert_for_all_rows_and_none_at_all() -> None:
    layer = Layer(256, 128)
    layer.ids[:] = torch.tensor([2, 5, 2], dtype=torch.int32)
    parts = layer.parts(slice(0, 40), layer.pool(2))
    assert same(parts, layer.wanted(slice(0, 40)))
    layer.ids[:] = 2
    assert bool(layer.parts(slice(0, 40), layer.pool(2)).isnan().all())


def test_an_id_of_no_expert_is_left_alone() -> None:
    layer = Layer(96, 40)
    layer.ids[0] = torch.tensor([-1, NUM_EXPERTS, 3], dtype=torch.int32)
    parts = layer.parts(slice(0, 2))
    assert bool(parts[0, :2].isnan().all())
    assert same(parts[0, 2], layer.wanted(slice(0, 2))[0, 2])


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_ends_so_and_spoils_no_other(strange: float) -> None:
    layer = Layer(300, 200, near=())
    layer.ids[:] = torch.tensor([1, 4, 6], dtype=torch.int32)
    pool = layer.pool(2)
    good = layer.parts(slice(0, 7), pool)
    layer.x[3, 290] = strange
    parts = layer.parts(slice(0, 7), pool)
    assert not bool(parts[3].isfinite().any())
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(parts[others], good[others])
    layer.x[3, 290] = 1.0
    assert bool(layer.parts(slice(0, 7), pool).isfinite().all())


def test_zeros_and_very_different_sizes_down_to_denormals() -> None:
    layer = Layer(300, 200, near=())
    layer.x[0] = 0.0
    layer.x[1, :128] *= 1e-30
    layer.x[2] *= 1e-12
    layer.x[3] *= 1e-36
    layer.x[4] *= torch.logspace(-38, 15, 300)
    # As in a process that has loaded an engine: no thread of the pool's may take that over.
    torch.set_flush_denormal(True)
    parts = layer.parts(slice(0, 5), layer.pool(3))
    torch.set_flush_denormal(False)
    assert bool((parts[0] == 0.0).all())
    assert same(parts, layer.wanted(slice(0, 5)))
    assert bool((parts[3].abs() < torch.finfo(torch.float32).tiny).any())


def test_an_expert_that_traded_places_is_computed_where_it_lies_now() -> None:
    layer = Layer(300, 200)
    pool, rows = layer.pool(2), slice(0, 5)
    layer.parts(rows, pool)
    place = int(layer.far.order[5])
    trade_places(layer.slots, layer.far, (5, 0), (2, place), TradeRoom.make(layer.spec, CPU))
    pool.follow(layer.far)
    wanted = Layer(300, 200, near=()).parts(rows)
    wanted[layer.ids[rows] == 5] = float("nan")
    assert bool((layer.ids[rows] == 2).any()) and bool((layer.ids[rows] == 5).any())
    assert same(layer.parts(rows, pool), wanted)


def test_the_pool_takes_what_it_was_counted_to_take() -> None:
    layer = Layer(96, 40)
    counted = PoolBuffers.make(layer.spec, 20, torch.device("meta"))
    held = layer.pool(max_rows=20).buffers
    for name in PoolBuffers.__slots__:
        assert getattr(held, name).nbytes == getattr(counted, name).nbytes
