"""Mixture of experts: router, routed experts, shared expert (model.md 1.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.elementwise import sigmoid, silu
from engine.linear import KernelReport, RowLinear

if TYPE_CHECKING:
    from engine.experts import GroupedExperts
    from engine.model_spec import MoeSpec


class MoeLayer:
    """y = sum over the top k experts of w * expert(x), plus the gated shared expert. x [T, H] -> [T, H].

    router_shared: W [E + 1 + 2*shared, H]: router logits, shared gate, shared gate and up rows, in one product.
    """

    __slots__ = ("_experts", "_head", "_shared_down", "_spec", "routed")

    def __init__(
        self,
        *,
        head: RowLinear,
        shared_down: RowLinear,
        experts: DenseExperts | GroupedExperts,
        spec: MoeSpec,
    ) -> None:
        self._head = head
        self._shared_down = shared_down
        self._experts = experts
        self._spec = spec
        self.routed: Tensor | None = None
        """int64 [E]: counts rows per expert where somebody records a profile."""

    @property
    def num_experts(self) -> int:
        """Routed experts."""
        return self._spec.num_experts

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights but those of experts that are held one by one."""
        routed = self._experts.num_bytes if isinstance(self._experts, DenseExperts) else 0
        return self._head.num_bytes + self._shared_down.num_bytes + routed

    def __call__(self, x: Tensor) -> Tensor:
        spec = self._spec
        head = self._head(x)
        sizes = [spec.num_experts, 1, 2 * spec.shared_dim]
        logits, gate, shared = torch.split_with_sizes(head, sizes, -1)
        weights, ids = route(logits, spec)
        if self.routed is not None:
            self.routed += torch.bincount(ids.flatten(), minlength=spec.num_experts)
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


class DenseExperts:
    """The routed part: x [T, H], weights [T, k], ids [T, k] -> [T, H], for layers with small experts.

    Runs every expert for every row, unselected ones with weight exactly 0: two large products instead of 2 k small
    ones, and every row has the same shape whatever it selected.
    """

    __slots__ = ("_down", "_expert_dim", "_gate_up", "num_bytes")

    def __init__(self, gate_up: Tensor, down: Tensor, *, exact: bool, report: KernelReport) -> None:
        """gate_up [E, 2*I, H], gate rows first; down [E, H, I]."""
        self.num_bytes = (gate_up.numel() + down.numel()) * down.element_size()
        self._expert_dim = down.shape[-1]
        # Rows ordered gate of all experts, then up of all experts, so that one chunk() splits them.
        stacked = gate_up.unflatten(1, (2, -1)).transpose(0, 1).reshape(-1, gate_up.shape[-1])
        self._gate_up = RowLinear(stacked, exact=exact, report=report)
        flat_down = down.transpose(0, 1).reshape(down.shape[1], -1)
        self._down = RowLinear(flat_down, exact=exact, report=report)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        hidden = silu(gate).mul_(up).unflatten(-1, (-1, self._expert_dim))
        scale = hidden.new_zeros(hidden.shape[:2]).scatter_(1, ids, weights)
        return self._down(hidden.mul_(scale.unsqueeze(-1)).flatten(1))
