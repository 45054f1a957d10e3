"""`python -m engine.training.random_model DIR`: the default model almost four times as large, with random weights.

For speed alone: what it writes means nothing. Stored as the default model is, int8 rows with a scale each.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from engine.config import model_path
from engine.geometry import model_tensors
from engine.model_spec import ModelSpec, spec_from_config
from engine.tensor_names import hash_constants
from engine.training.export import quantized_tensors, save_checkpoint

_DOUBLED = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "linear_num_key_heads"),
    *("linear_num_value_heads", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("hc_lowrank", "ple_embed_dim"),
)
"""Twice as wide everywhere is four times the weights of every product."""
_MORE_IDS = {"ngram_vocab_size_base": 2}
"""Tables grow with the width alone, so the n-gram table gets twice the rows."""


def wider(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with every width doubled; head sizes, layers and experts stay."""
    wide = {name: config[name] * 2 for name in _DOUBLED}
    return config | wide | {name: config[name] * times for name, times in _MORE_IDS.items()}


def write(directory: Path, seed: int = 0) -> None:
    """Write config, weights and the default model's tokenizer. Raises FileExistsError if there is such a directory."""
    source = model_path("default")
    config = wider(json.loads((source / "config.json").read_text(encoding="utf-8")))
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and "safetensors" not in file.name:
            if file.name != "config.json":
                shutil.copy(file, directory)
    spec = spec_from_config(config, name="random")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        fact.name: torch.randn(fact.shape, generator=generator) * fact.shape[-1] ** -0.5
        for fact in model_tensors(spec)
    }
    save_checkpoint(quantized_tensors(tensors | _hashes(spec)), directory)


def _hashes(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The constants of the n-gram hash, which transformers wants to find stored."""
    assert spec.ple is not None
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(spec.ple.layer_ids):
        constants = hash_constants(f"model.layers.{layer}.ple.", spec.ple, index)
        found |= {name: torch.tensor(values) for name, values in constants.items()}
    return found


def main(directory: Annotated[Path, typer.Argument(help="New directory.")]) -> None:
    """Write the checkpoint."""
    if directory.exists():
        raise typer.BadParameter(f"{directory} exists")
    write(directory)


if __name__ == "__main__":
    typer.run(main)
