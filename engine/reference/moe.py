"""Mixture of experts, one token after the other (model.md 1.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.reference.weights import Weights, under

if TYPE_CHECKING:
    from engine.reference.config import ReferenceConfig


def mixture_of_experts(u: Tensor, weights: Weights, config: ReferenceConfig) -> Tensor:
    """Routed experts plus the gated shared expert. u [T, H] -> [T, H]."""
    probabilities = (u @ weights["gate.weight"].T).softmax(-1)
    top = probabilities.topk(config.num_experts_per_tok, dim=-1)
    shares = top.values
    if config.norm_topk_prob:
        shares = shares / shares.sum(-1, keepdim=True)
    routed = torch.stack(
        [
            _routed_token(u[t], top.indices[t].tolist(), shares[t], weights)
            for t in range(u.shape[0])
        ]
    )
    shared = under(weights, "shared_expert")
    shared_out = _mlp(
        u,
        shared["gate_proj.weight"],
        shared["up_proj.weight"],
        shared["down_proj.weight"],
    )
    return routed + torch.sigmoid(u @ weights["shared_expert_gate.weight"].T) * shared_out


def expert_projections(weights: Weights, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and down of one expert, from fused or from per-expert tensors."""
    if "experts.gate_up_proj" in weights:
        gate, up = weights["experts.gate_up_proj"][expert].chunk(2, 0)
        return gate, up, weights["experts.down_proj"][expert]
    name = f"experts.{expert}"
    return (
        weights[f"{name}.gate_proj.weight"],
        weights[f"{name}.up_proj.weight"],
        weights[f"{name}.down_proj.weight"],
    )


def _routed_token(u: Tensor, experts: list[int], shares: Tensor, weights: Weights) -> Tensor:
    parts = [
        share * _mlp(u, *expert_projections(weights, expert))
        for expert, share in zip(experts, shares, strict=True)
    ]
    return torch.stack(parts).sum(0)


def _mlp(u: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(u @ gate.T) * (u @ up.T)) @ down.T
