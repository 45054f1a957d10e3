"""Rows must not depend on their company (product.md D3): products, elementwise functions, norms, experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.elementwise import sigmoid, silu, softplus
from engine.experts import ExpertPool, ExpertProducts, ExpertShape, ExpertStore, GroupedExperts
from engine.layers.moe import DenseExperts
from engine.layers.norm import ZeroCentredNorm, l2_normalized
from engine.layers.residual import GatedResidual
from engine.linear import (
    MAX_WINDOW_ROWS,
    ItemProducts,
    KernelReport,
    Method,
    RowLinear,
    _probe_weight,
    rows_agree,
)

SHAPES = [
    (1024, 384),
    (2560, 384),
    (384, 1280),
    (8192, 384),
    (36, 1536),
    (1536, 32),
    (7, 33),
    (1, 5),
]
DTYPES = [torch.float32, torch.bfloat16]


def agree(function: Method, width: int, dtype: torch.dtype = torch.float32) -> bool:
    return rows_agree(function, width, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_gives_each_row_the_same_bits_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    report = KernelReport()
    linear = RowLinear(weight, exact=True, report=report)
    assert agree(linear, shape[1], dtype)
    x = torch.randn(3, shape[1], dtype=torch.float64).to(dtype)
    expected = x.double() @ weight.double().T
    assert torch.allclose(linear(x).double(), expected, rtol=2e-2, atol=1e-2 * shape[1] ** 0.5)


def test_more_rows_than_a_window_are_multiplied_too() -> None:
    weight = torch.randn(48, 32)
    linear = RowLinear(weight, exact=True, report=KernelReport())
    x = torch.randn(3 * MAX_WINDOW_ROWS, 32)
    assert torch.allclose(linear(x), x @ weight.T, atol=1e-4)


def test_the_check_finds_a_function_whose_rows_depend_on_their_number() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * (1 + 1e-6 * x.shape[0])

    def by_place(x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[0]).unsqueeze(-1)

    assert not agree(scaled, 8)
    assert not agree(by_place, 8)


def test_where_no_method_is_exact_rows_are_multiplied_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> bool:
        return False

    monkeypatch.setattr("engine.linear.rows_agree", never)
    report = KernelReport()
    weight = torch.randn(6, 4)
    linear = RowLinear(weight, exact=True, report=report)
    assert report.counts == {"single": 1}
    assert "1 x single" in report.line()
    assert agree(linear, 4)
    x = torch.randn(3, 4)
    assert torch.allclose(linear(x), x @ weight.T, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_order_of_summation_shows(dtype: torch.dtype) -> None:
    """Even behind bf16's rounding, and for a single output column."""
    weight = _probe_weight(torch.empty(1, 1536, dtype=dtype)).float()

    def by_count(x: Tensor) -> Tensor:
        pieces = 2 if x.shape[0] < 7 else 3
        terms = x.float() * weight
        sums = [part.sum(-1, keepdim=True) for part in terms.split(1536 // pieces, -1)]
        return torch.stack(sums).sum(0).to(dtype)

    assert not agree(by_count, 1536, dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 64, 64), (3, 64, 128), (3, 576, 64), (4, 32, 64)], ids=str)
def test_items_do_not_depend_on_how_many_there_are(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, k, n = shape
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(MAX_WINDOW_ROWS * 2, m, k, generator=generator).to(dtype)
    b = torch.randn(MAX_WINDOW_ROWS * 2, k, n, generator=generator).to(dtype)
    if transposed:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    batched = ItemProducts(exact=True)
    monkeypatch.setattr("engine.linear.items_agree", lambda *_, **__: False)
    one_by_one = ItemProducts(exact=True)
    for rows in (1, 2, 7, MAX_WINDOW_ROWS):
        parts = [torch.bmm(a[i : i + 2], b[i : i + 2]) for i in range(0, 2 * rows, 2)]
        expected = torch.cat(parts)
        assert torch.equal(one_by_one(a[: 2 * rows], b[: 2 * rows], group=2), expected)
    monkeypatch.undo()
    for rows in (1, 2, 7, MAX_WINDOW_ROWS):
        parts = [batched(a[i : i + 2], b[i : i + 2], group=2) for i in range(0, 2 * rows, 2)]
        assert torch.equal(batched(a[: 2 * rows], b[: 2 * rows], group=2), torch.cat(parts))


def test_the_gated_residual_does_not_see_its_company() -> None:
    generator = torch.Generator().manual_seed(6)
    report = KernelReport()
    residual = GatedResidual(
        norm=ZeroCentredNorm(torch.randn(1536), eps=1e-6, group=384, factor=0.25),
        down_inject=RowLinear(
            torch.randn(36, 1536, generator=generator), exact=True, report=report
        ),
        up=RowLinear(torch.randn(1536, 32, generator=generator), exact=True, report=report),
        num_streams=4,
        rank=32,
    )
    assert agree(lambda x: torch.cat(residual.read(x), dim=-1), 1536)


@pytest.mark.parametrize("width", [1, 3, 8, 32, 40, 64, 1536, 4100])
@pytest.mark.parametrize("function", [sigmoid, silu, softplus], ids=lambda f: f.__name__)
def test_elementwise_functions_do_not_see_where_an_element_lies(
    function: Method, width: int
) -> None:
    assert agree(function, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [3, 32, 64])
def test_elementwise_functions_are_right(width: int, dtype: torch.dtype) -> None:
    x = torch.linspace(-30, 30, 5 * width).view(5, width).to(dtype)
    wide = x.double()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert torch.allclose(sigmoid(x).double(), torch.sigmoid(wide), rtol=tolerance, atol=1e-7)
    silu_wide = torch.nn.functional.silu(wide)
    assert torch.allclose(silu(x).double(), silu_wide, rtol=tolerance, atol=1e-7)
    if dtype == torch.float32:
        assert torch.allclose(softplus(x).double(), torch.nn.functional.softplus(wide), atol=1e-6)


def test_softplus_of_large_values_is_finite() -> None:
    assert softplus(torch.tensor([200.0, -200.0])).tolist() == [200.0, 0.0]


@pytest.mark.parametrize("width", [48, 384, 1536])
def test_norms_do_not_see_their_company(width: int) -> None:
    norm = ZeroCentredNorm(torch.randn(width), eps=1e-6, group=width // 4)
    assert agree(norm, width)
    assert agree(l2_normalized, width)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "grouped"])
def test_experts_do_not_see_who_else_picked_them(dense: bool) -> None:
    experts = _experts(dense)
    generator = torch.Generator().manual_seed(3)
    pick = torch.randn(32, 6, generator=generator)

    def routed(x: Tensor) -> Tensor:
        weights, ids = (x @ pick).softmax(-1).topk(2)
        return experts(x, weights.round(decimals=2), ids)

    assert agree(routed, 32)


def test_dense_and_grouped_experts_agree_with_the_sum_over_experts() -> None:
    x = torch.randn(MAX_WINDOW_ROWS * 2 + 3, 32, generator=torch.Generator().manual_seed(4))
    weights, ids = torch.rand(x.shape[0], 6).softmax(-1).topk(3)
    gate_up, down = _expert_weights()
    expected = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            expected[row] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    for dense in (True, False):
        assert torch.allclose(_experts(dense)(x, weights, ids), expected, atol=1e-4)


def _expert_weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    gate_up = torch.randn(6, 2 * 20, 32, generator=generator) / 6
    return gate_up, torch.randn(6, 32, 20, generator=generator) / 5


def _experts(dense: bool) -> DenseExperts | GroupedExperts:
    gate_up, down = _expert_weights()
    if dense:
        return DenseExperts(gate_up, down, exact=True, report=KernelReport())
    shape = ExpertShape(hidden=32, width=20, dtype=torch.float32)
    store = ExpertStore(
        ExpertProducts(ExpertPool(2), exact=True, report=KernelReport()), shape, len(down)
    )
    grouped = store.add_layer(torch.device("cpu"))
    for expert in range(len(down)):
        grouped.layer.put_host(expert, gate_up[expert], down[expert])
    store.prepare()
    return grouped
