"""Tensors of a checkpoint by name, and the part of them below one prefix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
"""Names relative to the module that reads them; floating tensors are fp32."""


def under(weights: Weights, prefix: str) -> Weights:
    """The tensors whose name starts with `prefix.`, with that start removed."""
    start = prefix + "."
    return {name[len(start) :]: t for name, t in weights.items() if name.startswith(start)}


def as_float32(tensors: Weights) -> Weights:
    """Every floating tensor raised to fp32; integer tensors as they are."""
    return {
        name: t.to(torch.float32) if t.is_floating_point() else t for name, t in tensors.items()
    }


def text_weights(tensors: Weights) -> Weights:
    """The trunk's tensors, whether the checkpoint holds the text model alone or inside a larger one."""
    nested = under(tensors, "model.language_model")
    return nested or under(tensors, "model")
