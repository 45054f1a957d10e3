"""Products whose rows do not depend on their company (product.md D3, rule 1).

A library's product of m rows may round a row differently for another m, and its product of many items one item
differently for another number of items. Methods are tried in a fixed order on probes of the same shape, and the first
that gives every row the same bits is taken; the last one computes each row by itself, which no library can make depend
on the others. The choice depends on shape, dtype and machine, never on timing, so two starts choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.interface import MAX_SLOTS, MAX_SPEC

MAX_WINDOW_ROWS = MAX_SLOTS * (MAX_SPEC + 1)
_PACK_MIN_ELEMENTS = 1 << 18
"""oneDNN's packed product has about 40 us of fixed cost a call; below this the plain one is faster."""
_PROBE_MAX_ELEMENTS = 1 << 24
"""Larger weights are probed with their own values: a copy would cost too much memory."""
_PLAIN, _PACKED, _SINGLE = "plain", "packed", "single"

Method = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class KernelReport:
    """Which methods were chosen, counted by name; `found` remembers them, so that a shape is probed once."""

    counts: dict[str, int] = field(default_factory=dict)
    found: dict[tuple[int, int, torch.dtype], str] = field(default_factory=dict)

    def add(self, method: str) -> None:
        """Count one weight."""
        self.counts[method] = self.counts.get(method, 0) + 1

    def line(self) -> str:
        """One readable line for the start-up report."""
        parts = [f"{count} x {name}" for name, count in sorted(self.counts.items())]
        return "row-exact linears: " + (", ".join(parts) if parts else "none")


class RowLinear:
    """y = x W^T for a fixed W [out, in]; x [m, in] -> [m, out], every row the same bits for any m <= MAX_WINDOW_ROWS.

    More rows than that (prompt chunks) go through the same weights without the promise, which they do not need: a
    prompt is cut by a rule on its tokens alone, so a chunk always has the same rows.
    """

    __slots__ = ("_method", "_wide", "in_features", "num_bytes", "out_features")

    def __init__(self, weight: Tensor, *, exact: bool, report: KernelReport) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.numel() * weight.element_size()
        name, method, wide = _choose(weight.contiguous(), exact=exact, report=report)
        report.add(name)
        self._method = method
        self._wide = wide

    def __call__(self, x: Tensor) -> Tensor:
        return self._method(x) if x.shape[0] <= MAX_WINDOW_ROWS else self._wide(x)


class SharedProduct:
    """y = x W^T for every W [out, in] that is like `probe` in shape, dtype, device and alignment; rows as in RowLinear.

    The weight is read where it lies and never repacked, so weights of different homes give the same bits.
    """

    __slots__ = ("_make",)

    def __init__(self, probe: Tensor, *, exact: bool, report: KernelReport) -> None:
        name = _PLAIN
        if exact and probe.device.type == "cpu":
            weight = _probe_weight(probe)
            name = next(n for n, make in _IN_PLACE.items() if _is_exact(n, make(weight), weight))
        report.add(f"{name} expert")
        self._make = _IN_PLACE[name]

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [m, in], m <= MAX_WINDOW_ROWS -> [m, out]."""
        return self._make(weight)(x)


class ItemProducts:
    """Batched products whose items do not depend on how many there are.

    Where the library's product of a shape does depend on it, each group of items is multiplied by itself.
    """

    __slots__ = ("_batched", "_exact")

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._batched: dict[tuple[int, ...], bool] = {}

    def __call__(self, a: Tensor, b: Tensor, *, group: int) -> Tensor:
        """a [I, m, k] times b [I, k, n], where `group` items belong to one row and I is a multiple of it."""
        if a.shape[0] == group or not self._exact or a.device.type != "cpu":
            return torch.bmm(a, b)
        transposed = b.stride(-1) != 1
        key = (*a.shape[1:], b.shape[-1], group, a.element_size(), transposed)
        if key not in self._batched:
            shape = (a.shape[1], a.shape[2], b.shape[-1])
            self._batched[key] = items_agree(shape, group, a.dtype, transposed=transposed)
        if self._batched[key]:
            return torch.bmm(a, b)
        pairs = zip(a.split(group), b.split(group), strict=True)
        return torch.cat([torch.bmm(x, y) for x, y in pairs])


def rows_agree(method: Method, in_features: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `method` gives every row the same bits for 1 to MAX_WINDOW_ROWS rows and under permutation."""
    generator = torch.Generator().manual_seed(20)
    x = _cancelling((MAX_WINDOW_ROWS, in_features), -1, -1.0, generator).to(device, dtype)
    whole = method(x)
    order = torch.randperm(MAX_WINDOW_ROWS, generator=generator).to(device)
    if not torch.equal(method(x[order]), whole[order]):
        return False
    for m in range(1, MAX_WINDOW_ROWS):
        start = MAX_WINDOW_ROWS - m if m % 2 else 0
        if not torch.equal(method(x[start : start + m].contiguous()), whole[start : start + m]):
            return False
    return True


def items_agree(
    shape: tuple[int, int, int], group: int, dtype: torch.dtype, *, transposed: bool
) -> bool:
    """Whether torch.bmm of items [m, k] x [k, n] gives them the same bits for 1 to MAX_WINDOW_ROWS groups."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(21)
    count = MAX_WINDOW_ROWS * group
    a = _cancelling((count, m, k), -1, -1.0, generator).to(dtype)
    b = _cancelling((count, k, n), 1, 1.0, generator).to(dtype)
    if transposed:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    whole = torch.bmm(a, b)
    for rows in range(1, MAX_WINDOW_ROWS):
        items = slice(rows % 3 * group, (rows % 3 + rows) * group)
        if not torch.equal(torch.bmm(a[items], b[items]), whole[items]):
            return False
    return True


def _cancelling(
    shape: tuple[int, ...], axis: int, sign: float, generator: torch.Generator
) -> Tensor:
    """Random values whose second half along an axis repeats the first in another order, times `sign`.

    A product of two such sums to 0 but for its rounding errors, so that another order of summation shows even after
    rounding to bf16.
    """
    values = torch.randn(shape, generator=generator)
    half = shape[axis] // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(half))
    values.narrow(axis, half, half).copy_(values.narrow(axis, 0, half).index_select(axis, order))
    values.narrow(axis, half, half).mul_(sign)
    if shape[axis] % 2:
        values.narrow(axis, 2 * half, 1).zero_()
    return values


def _choose(weight: Tensor, *, exact: bool, report: KernelReport) -> tuple[str, Method, Method]:
    plain = _plain(weight)
    if weight.device.type != "cpu":
        return _PLAIN, plain, plain
    candidates = dict(_candidates(weight))
    if not exact:
        name = next(iter(candidates))
    else:
        key = (weight.shape[0], weight.shape[1], weight.dtype)
        if key not in report.found:
            report.found[key] = _first_exact(_probe_weight(weight))
        name = report.found[key]
    method = candidates[name]
    return name, method, method if name == _PACKED else plain


def _first_exact(weight: Tensor) -> str:
    return next(name for name, method in _candidates(weight) if _is_exact(name, method, weight))


def _is_exact(name: str, method: Method, weight: Tensor) -> bool:
    """The last method is exact by itself."""
    return name == _SINGLE or rows_agree(method, weight.shape[1], weight.dtype, weight.device)


def _probe_weight(weight: Tensor) -> Tensor:
    if weight.numel() > _PROBE_MAX_ELEMENTS:
        return weight
    generator = torch.Generator().manual_seed(22)
    return _cancelling(tuple(weight.shape), -1, 1.0, generator).to(weight.dtype)


def _candidates(weight: Tensor) -> Sequence[tuple[str, Method]]:
    """Methods by preference. One row by itself comes last: it reads the weight once a row."""
    padded = [(f"pad{tile}", _padded(weight, tile)) for tile in (4, 8, MAX_WINDOW_ROWS)]
    single = (_SINGLE, _single(weight))
    if weight.dtype != torch.float32:
        return [(_PLAIN, _plain(weight)), *padded, single]
    packed = _packed(weight)
    if packed is None:
        return [*padded, single]
    if weight.numel() >= _PACK_MIN_ELEMENTS:
        return [(_PACKED, packed), *padded, single]
    return [*padded, (_PACKED, packed), single]


def _plain(weight: Tensor) -> Method:
    def plain(x: Tensor) -> Tensor:
        return F.linear(x, weight)

    return plain


def _padded(weight: Tensor, tile: int) -> Method:
    def padded(x: Tensor) -> Tensor:
        m = x.shape[0]
        missing = -m % tile
        if not missing:
            return F.linear(x, weight)
        return F.linear(torch.constant_pad_nd(x, (0, 0, 0, missing)), weight)[:m]

    return padded


def _single(weight: Tensor) -> Method:
    def single(x: Tensor) -> Tensor:
        # A copy each: a library may also round by how its input is aligned.
        return torch.cat([F.linear(row.clone(), weight) for row in x.split(1)])

    return single


def _packed(weight: Tensor) -> Method | None:
    """oneDNN's prepacked product, or None where this torch has none. Keeps its own copy of the weight."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        packed_weight = ops._reorder_linear_weight(weight, MAX_WINDOW_ROWS)
        linear = ops._linear_pointwise
        linear(weight.new_zeros(1, weight.shape[1]), packed_weight, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None

    def packed(x: Tensor) -> Tensor:
        return linear(x, packed_weight, None, "none", [], "")

    return packed


_IN_PLACE: dict[str, Callable[[Tensor], Method]] = {
    _PLAIN: _plain,
    **{f"pad{tile}": partial(_padded, tile=tile) for tile in (4, 8, MAX_WINDOW_ROWS)},
    _SINGLE: _single,
}
"""Methods that read the weight where it lies, by preference."""
