"""Mixture of experts: router, routed experts, shared expert (model.md 1.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.elementwise import sigmoid, silu
from engine.linear import MAX_WINDOW_ROWS, KernelReport, RowLinear

if TYPE_CHECKING:
    from engine.model_spec import MoeSpec

_DENSE_MAX_BYTES = 16 << 20
"""Expert weights of one layer up to this stay in cache, where two products over all experts beat a loop over few."""


class MoeLayer:
    """y = sum over the top k experts of w * expert(x), plus the gated shared expert. x [T, H] -> [T, H].

    router_shared: W [E + 1 + 2*shared, H]: router logits, shared gate, shared gate and up rows, in one product.
    """

    __slots__ = ("_experts", "_head", "_shared_down", "_spec")

    def __init__(
        self, *, head: RowLinear, shared_down: RowLinear, experts: RoutedExperts, spec: MoeSpec
    ) -> None:
        self._head = head
        self._shared_down = shared_down
        self._experts = experts
        self._spec = spec

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return self._head.num_bytes + self._shared_down.num_bytes + self._experts.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        spec = self._spec
        head = self._head(x)
        sizes = [spec.num_experts, 1, 2 * spec.shared_dim]
        logits, gate, shared = torch.split_with_sizes(head, sizes, -1)
        weights, ids = route(logits, spec)
        shared_gate, shared_up = shared.chunk(2, dim=-1)
        out = self._shared_down(silu(shared_gate).mul_(shared_up)).mul_(sigmoid(gate))
        return out.add_(self._experts(x, weights, ids))


def route(logits: Tensor, spec: MoeSpec) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> weights [T, k] in the logits' dtype and expert ids int64 [T, k]."""
    probabilities = torch.softmax(logits.to(torch.float32), dim=-1)
    top, ids = probabilities.topk(spec.num_active, dim=-1)
    if spec.normalize:
        top = top / top.sum(-1, keepdim=True)
    return top.to(logits.dtype), ids


class RoutedExperts:
    """The routed part: x [T, H], weights [T, k], ids [T, k] -> [T, H].

    Small layers run every expert for every row, unselected ones with weight exactly 0: two large products instead of
    2 k small ones, and every row has the same shape whatever it selected. Large layers run each selected expert once
    over its rows.
    """

    __slots__ = ("_all_down", "_all_gate_up", "_down", "_expert_dim", "_gate_up", "num_bytes")

    def __init__(self, gate_up: Tensor, down: Tensor, *, exact: bool, report: KernelReport) -> None:
        """gate_up [E, 2*I, H], gate rows first; down [E, H, I]."""
        self.num_bytes = (gate_up.numel() + down.numel()) * down.element_size()
        self._expert_dim = down.shape[-1]
        self._all_gate_up: RowLinear | None = None
        self._all_down: RowLinear | None = None
        self._gate_up: list[RowLinear] = []
        self._down: list[RowLinear] = []
        if self.num_bytes <= _DENSE_MAX_BYTES:
            # Rows ordered gate of all experts, then up of all experts, so that one chunk() splits them.
            stacked = gate_up.unflatten(1, (2, -1)).transpose(0, 1).reshape(-1, gate_up.shape[-1])
            self._all_gate_up = RowLinear(stacked, exact=exact, report=report)
            flat_down = down.transpose(0, 1).reshape(down.shape[1], -1)
            self._all_down = RowLinear(flat_down, exact=exact, report=report)
            return
        self._gate_up = [RowLinear(w, exact=exact, report=report) for w in gate_up]
        self._down = [RowLinear(w, exact=exact, report=report) for w in down]

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if self._all_gate_up is not None and self._all_down is not None:
            return self._dense(x, weights, ids, self._all_gate_up, self._all_down)
        return self._grouped(x, weights, ids)

    def _dense(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: RowLinear, down: RowLinear
    ) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        hidden = silu(gate).mul_(up).unflatten(-1, (-1, self._expert_dim))
        scale = hidden.new_zeros(hidden.shape[:2]).scatter_(1, ids, weights)
        return down(hidden.mul_(scale.unsqueeze(-1)).flatten(1))

    def _grouped(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        num_rows, num_active = ids.shape
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self._gate_up)).tolist()
        parts = x.new_empty(num_rows * num_active, x.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            chosen = order[start : start + count]
            parts[chosen] = self._expert(expert, x.index_select(0, chosen // num_active))
            start += count
        # A row's experts are added in rank order, so the sum does not depend on who else is in the window.
        weighted = parts.view(num_rows, num_active, -1).mul_(weights.unsqueeze(-1))
        total = weighted[:, 0]
        for rank in range(1, num_active):
            total = total + weighted[:, rank]
        return total

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        return (
            torch.cat([self._expert_tile(expert, tile) for tile in rows.split(MAX_WINDOW_ROWS)])
            if rows.shape[0] > MAX_WINDOW_ROWS
            else self._expert_tile(expert, rows)
        )

    def _expert_tile(self, expert: int, rows: Tensor) -> Tensor:
        gate, up = self._gate_up[expert](rows).chunk(2, dim=-1)
        return self._down[expert](silu(gate).mul_(up))
