"""Between the training model and checkpoint files: 8-bit export, and back to plain floats.

Format `stratagate_int8`: a weight matrix NAME is I8 of its own shape with NAME_scale, F32, of the
shape without the last dimension; W = NAME * NAME_scale[..., None]. Everything small is BF16 or F32,
hash buffers are I64.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.training.model import TrainingModel

if TYPE_CHECKING:
    from engine.training.config import ModelConfig

SCALE_SUFFIX = "_scale"
MAX_SHARD_BYTES = 15 << 20
_TABLE = "ple_embedding.ngram_embedding."
_KEEP_FLOAT32 = ("A_log", "dt_bias")
# Convolutions are tiny and feed recurrences; routers and mixing gates decide between branches.
_KEEP_BFLOAT16 = ("conv1d", "mlp.gate.", "shared_expert_gate", "block_inject_weight", "in_proj_a")


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether the export stores this tensor as int8."""
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return False
    return not any(part in name for part in _KEEP_BFLOAT16)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 by rows: weight [..., n] -> int8 [..., n] and fp32 scale [...]."""
    weight = weight.float()
    scale = (weight.abs().amax(dim=-1) / 127).clamp_min(1e-12)
    return (weight / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Back to fp32."""
    return values.float() * scale[..., None]


def checkpoint_tensors(model: TrainingModel) -> dict[str, Tensor]:
    """fp32 (and int64) tensors under checkpoint names, the n-gram table cut into its shards."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if _TABLE in name:
            parts = model.config.split_ngram_parts
            prefix = name.removesuffix("weight")
            for index, shard in enumerate(tensor.chunk(parts)):
                tensors[f"{prefix}shard_{index}.weight"] = shard.contiguous()
        else:
            tensors[name] = tensor.contiguous()
    return tensors


def quantized_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored form of checkpoint tensors."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_quantized(name, tensor):
            stored[name], stored[name + SCALE_SUFFIX] = quantize(tensor)
        elif not tensor.is_floating_point() or any(part in name for part in _KEEP_FLOAT32):
            stored[name] = tensor
        else:
            stored[name] = tensor.to(torch.bfloat16)
    return stored


def float_tensors(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `quantized_tensors` up to rounding: fp32 and int64 under checkpoint names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            tensors[name] = dequantize(tensor, stored[name + SCALE_SUFFIX])
        elif not name.endswith(SCALE_SUFFIX):
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    return tensors


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if used + size > MAX_SHARD_BYTES and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    return shards


def save_checkpoint(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write safetensors files under 16 MiB each and their index, replacing older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards = _shards(tensors)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
        total += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=1, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def load_stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, as stored."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        stored |= load_file(path)
    return stored


def load_model(folder: Path, config: ModelConfig) -> TrainingModel:
    """A training model with the weights of an exported folder.

    Raises: RuntimeError if a tensor is missing, left over or of another shape.
    """
    tensors = float_tensors(load_stored(folder))
    shards = sorted(
        (name for name in tensors if _TABLE + "shard_" in name),
        key=lambda name: int(name.rpartition("shard_")[2].split(".")[0]),
    )
    table = torch.cat([tensors.pop(name) for name in shards])
    tensors[shards[0].rpartition("shard_")[0] + "weight"] = table
    model = TrainingModel(config)
    model.load_state_dict(tensors)
    return model


def write_float_copy(folder: Path, out: Path, dtype: torch.dtype) -> None:
    """A checkpoint folder that Hugging Face transformers loads: plain floats, no quantization."""
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in float_tensors(load_stored(folder)).items()
    }
    save_checkpoint(tensors, out)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    config["dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        if path.suffix in {".json", ".jinja"} and not (out / path.name).exists():
            shutil.copy(path, out / path.name)
