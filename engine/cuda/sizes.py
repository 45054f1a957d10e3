"""Bytes of what a CUDA step holds, by part: counted the same on the device and, before anything is there, on `meta`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from engine.geometry import TRUNK_PREFIX
from engine.memory_plan import EXPERTS_4_BITS, TABLE, TIER_ONE, TIER_TWO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.cuda.weights import CudaModel

BUFFERS = "step buffers"


def tensor_bytes(thing: object) -> int:
    """All tensors in a tensor, a frozen structure of them, or a tuple; other values count nothing."""
    if isinstance(thing, Tensor):
        return thing.numel() * thing.element_size()
    if is_dataclass(thing):
        return sum(tensor_bytes(getattr(thing, field.name)) for field in fields(thing))
    if isinstance(thing, tuple):
        return sum(map(tensor_bytes, cast("tuple[object, ...]", thing)))
    return 0


def weight_parts(model: CudaModel) -> dict[str, int]:
    """Bytes of a model's weights by part; parts that it has none of are left out."""
    layers = model.layers
    table = sum(tensor_bytes(layer.ple.table) for layer in layers if layer.ple is not None)
    experts = sum(tensor_bytes((x.moe.gate_up, x.moe.down)) for x in layers)
    is_tiered = any(layer.moe.far is not None for layer in layers)
    residuals = (model.final, *((x.mixer_residual, x.moe_residual) for x in layers))
    parts = {
        "embedding": tensor_bytes(model.embedding),
        "ple": _all(layer.ple for layer in layers) - table,
        TABLE: table,
        "gdn": _all(layer.gdn for layer in layers),
        "qsa": _all(layer.qsa for layer in layers),
        "residual": tensor_bytes(residuals),
        "moe": _all((layer.moe.head, layer.moe.shared_down) for layer in layers),
        TIER_ONE if is_tiered else EXPERTS_4_BITS: experts,
        "head": tensor_bytes(model.head),
        "draft layer": tensor_bytes(model.draft),
        "rotary tables": tensor_bytes((model.cos, model.sin)),
    }
    parts = {name: num_bytes for name, num_bytes in parts.items() if num_bytes}
    if is_tiered:
        far = [layer.moe.far for layer in layers if layer.moe.far is not None]
        parts |= {TIER_ONE: experts, TIER_TWO: _all((x.gate_up, x.down) for x in far)}
    return parts


def table_bytes(model: CudaModel) -> int:
    """Bytes of the tables by which tiered experts are found."""
    return _all(x.moe.far.tables for x in model.layers if x.moe.far is not None)


def _all(things: Iterable[object]) -> int:
    return sum(map(tensor_bytes, things))


class NamesOnly:
    """Tensors that have shapes and no memory: what a loader makes of them can be counted."""

    trunk = TRUNK_PREFIX

    def has(self, name: str) -> bool:
        """Every one: what is stored in parts takes as much once it is loaded."""
        del name
        return True

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Of any type: what is held is of the loader's choosing."""
        del name
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def take_each(self, name: str, shape: tuple[int, ...]) -> Callable[[int], Tensor]:
        """As `take`, by index on the first axis."""
        return lambda index: self.take(name, shape[1:])

    def finish(self, *, ignore: tuple[str, ...] = ()) -> None:
        """What is left over is found when the weights are read."""
