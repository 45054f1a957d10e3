"""Muon for the matrices, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest semi-orthogonal matrix, so every direction moves by
the same amount; matrices of one shape are updated together.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from engine.training.config import TrainConfig

_MATRICES = (
    "in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj",
    "down_proj", "gate_proj", "up_proj", "input_mix_weight_down", "input_mix_weight_up",
    "key_proj", "value_proj", "fc_embedding", "fc_hidden", "index_qk_proj",
)  # fmt: skip
_TABLES = ("embed_tokens", "ngram_embedding")
_MOMENTUM = 0.95
# A table row is touched by few tokens of a batch, so it may move further each time.
_TABLE_LR_FACTOR = 3.0
_TABLE_DECAY_FACTOR = 0.3


def orthogonalize(matrices: Tensor) -> Tensor:
    """Newton-Schulz, five steps in bf16, on [N, rows, columns]: all singular values come near 1."""
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if is_tall else x


class Muon:
    """Momentum buffers [N, rows, columns], one for all matrices of a shape."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        groups: defaultdict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[tuple(parameter.shape)].append(parameter)
        self.groups = [(shape, groups[shape]) for shape in sorted(groups)]
        self.buffers = [
            torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self.groups
        ]
        self.lr = lr
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        lr = self.lr * lr_scale
        for (shape, group), buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([_grad(parameter) for parameter in group])
            buffer.lerp_(grads, 1 - _MOMENTUM)
            update = orthogonalize(grads.lerp(buffer, _MOMENTUM).flatten(0, -3))
            # The factor gives updates the size that AdamW's have, whatever the shape.
            update = update.float() * (0.2 * max(shape[-2:]) ** 0.5)
            tensors: list[Tensor] = [*group]
            torch._foreach_mul_(tensors, 1 - lr * self.weight_decay)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            torch._foreach_add_(tensors, list(update.view(buffer.shape)), alpha=-lr)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Optimizer:
    """Both optimizers over one model, stepped together under one learning-rate factor."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        matrices: list[nn.Parameter] = []
        tables: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if any(part in name for part in _MATRICES):
                matrices.append(parameter)
            elif any(part in name for part in _TABLES):
                tables.append(parameter)
            else:
                others.append(parameter)
        self.muon = Muon(matrices, config.matrix_lr, config.weight_decay)
        decay = config.weight_decay * _TABLE_DECAY_FACTOR
        heads = [p for p in others if p.dim() > 1]
        vectors = [p for p in others if p.dim() <= 1]
        lr = config.vector_lr
        self.base_lrs = (lr * _TABLE_LR_FACTOR, lr, lr)
        self.adam = torch.optim.AdamW(
            [
                {"params": tables, "weight_decay": decay},
                {"params": heads, "weight_decay": decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=matrices[0].is_cuda,
        )

    def step(self, lr_scale: float) -> None:
        for group, base_lr in zip(self.adam.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * lr_scale
        self.adam.step()
        self.muon.step(lr_scale)
        self.adam.zero_grad(set_to_none=True)
        for _, group in self.muon.groups:
            for parameter in group:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "muon": self.muon.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for buffer, saved in zip(self.muon.buffers, state["muon"], strict=True):
            buffer.copy_(saved)
