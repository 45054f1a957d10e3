"""All float tensors of a source under names that every form of a model has, however it is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.sources.base import TensorSource


def expert_parts(source: TensorSource, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, or one for each expert and shard, under the names that every form has."""
    values = source.get(name)
    prefix = name.rpartition(".")[0]
    if name.endswith("gate_up_proj"):
        width = values.shape[1] // 2
        for expert, one in enumerate(values):
            yield f"{prefix}.{expert}.gate_proj.weight", one[:width]
            yield f"{prefix}.{expert}.up_proj.weight", one[width:]
    elif name.endswith("experts.down_proj"):
        yield from ((f"{prefix}.{e}.down_proj.weight", one) for e, one in enumerate(values))
    else:
        yield name, values


def whole(source: TensorSource) -> dict[str, torch.Tensor]:
    """Every float tensor: experts one by one, table shards joined."""
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(source.names()):
        if source.get(name).dtype != torch.int64:
            tensors |= dict(expert_parts(source, name))
    shards = sorted(
        (n for n in tensors if ".shard_" in n),
        key=lambda n: int(n.split("shard_")[1].split(".")[0]),
    )
    if shards:
        table = torch.cat([tensors.pop(n) for n in shards])
        tensors[shards[0].split("shard_")[0] + "weight"] = table
    return tensors
