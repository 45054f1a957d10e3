"""Matrix products whose rows do not depend on their company (product.md D3, rule 1).

A library's product of m rows may round a row differently for another m. `RowLinear` picks, per weight shape and
dtype, the first of a fixed list of methods that `rows_agree` finds exact for every m up to MAX_WINDOW_ROWS. The list
depends on the shape alone and never on timing, so two starts on one machine choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.interface import MAX_SPEC

MAX_WINDOW_SLOTS = 4
MAX_WINDOW_ROWS = MAX_WINDOW_SLOTS * (MAX_SPEC + 1)
_PACK_MIN_ELEMENTS = 1 << 18
"""oneDNN's packed product has about 40 us of fixed cost a call; below this the plain one is faster."""

Method = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class KernelReport:
    """Which methods were chosen, counted by name; `inexact` lists shapes where none was exact.

    `found` remembers the method of each shape and dtype, so that a shape is checked once.
    """

    counts: dict[str, int] = field(default_factory=dict)
    inexact: list[str] = field(default_factory=list)
    found: dict[tuple[int, int, torch.dtype], str] = field(default_factory=dict)

    def add(self, method: str) -> None:
        """Count one weight."""
        self.counts[method] = self.counts.get(method, 0) + 1

    def line(self) -> str:
        """One readable line for the start-up report."""
        parts = [f"{count} x {name}" for name, count in sorted(self.counts.items())]
        text = "row-exact linears: " + ", ".join(parts) if parts else "row-exact linears: none"
        if self.inexact:
            text += f"; NOT exact for {', '.join(self.inexact)}"
        return text


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


def rows_agree(method: Method, in_features: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `method` gives every row the same bits for 1 to MAX_WINDOW_ROWS rows and under permutation."""
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(MAX_WINDOW_ROWS, in_features, generator=generator).to(device, dtype)
    whole = method(x)
    order = torch.randperm(MAX_WINDOW_ROWS, generator=generator).to(device)
    if not torch.equal(method(x[order]), whole[order]):
        return False
    for m in range(1, MAX_WINDOW_ROWS):
        start = MAX_WINDOW_ROWS - m if m % 2 else 0
        if not torch.equal(method(x[start : start + m].contiguous()), whole[start : start + m]):
            return False
    return True


def _choose(weight: Tensor, *, exact: bool, report: KernelReport) -> tuple[str, Method, Method]:
    plain = _plain(weight)
    if weight.device.type != "cpu":
        return "plain", plain, plain
    candidates = _candidates(weight)
    if not exact:
        name, method = candidates[0]
        return name, method, method
    key = (*weight.shape, weight.dtype)
    if key not in report.found:
        report.found[key] = _first_exact(candidates, weight, report)
    name = report.found[key]
    method = dict(candidates).get(name, plain)
    return name, method, method if name == _PACKED else plain


def _first_exact(
    candidates: Sequence[tuple[str, Method]], weight: Tensor, report: KernelReport
) -> str:
    for name, method in candidates:
        if rows_agree(method, weight.shape[1], weight.dtype, weight.device):
            return name
    report.inexact.append("x".join(map(str, weight.shape)))
    return "plain"


_PACKED = "packed"


def _candidates(weight: Tensor) -> Sequence[tuple[str, Method]]:
    padded = [(f"pad{tile}", _padded(weight, tile)) for tile in (4, 8, MAX_WINDOW_ROWS)]
    if weight.dtype != torch.float32:
        return [("plain", _plain(weight)), *padded]
    packed = _packed(weight)
    if packed is None:
        return padded
    if weight.numel() >= _PACK_MIN_ELEMENTS:
        return [(_PACKED, packed), *padded]
    return [*padded, (_PACKED, packed)]


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
