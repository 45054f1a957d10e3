"""Which kind of weights a path holds: told by what is there, and opened."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import WeightMismatch
from engine.geometry import TRUNK_PREFIX
from engine.model_spec import ModelSpec, spec_from_config
from engine.pack.reader import is_pack, open_pack
from engine.sources.ggml_names import EMBEDDING_NAME, TABLE_NAME, NameMap
from engine.sources.ggml_source import GgmlSource
from engine.sources.gguf_files import GgufFiles
from engine.sources.gguf_metadata import config_from_metadata, hash_constants
from engine.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    from engine.sources.base import TensorSource

GGUF_SUFFIX = ".gguf"


def read_spec(path: Path) -> ModelSpec:
    """Geometry of the model at a path. Raises ConfigMismatch with key, found and required."""
    if path.suffix == GGUF_SUFFIX:
        return gguf_spec(_gguf(path), path.stem)
    return ModelSpec.from_dir(path)


def open_source(path: Path, spec: ModelSpec) -> TensorSource:
    """Weights of the model at a path. Raises WeightMismatch for a file that cannot be read."""
    if path.suffix == GGUF_SUFFIX:
        return gguf_source(_gguf(path), spec, str(path))
    return open_pack(path, spec) if is_pack(path) else SafetensorsSource(path)


def gguf_spec(files: GgufFiles, name: str) -> ModelSpec:
    """Geometry out of a GGUF file's metadata and the shapes that metadata leaves out."""
    return spec_from_config(gguf_config(files), name=name)


def gguf_config(files: GgufFiles) -> dict[str, object]:
    """The configuration that a checkpoint of this file would have."""
    if EMBEDDING_NAME not in files.tensors:
        raise WeightMismatch(
            f"{EMBEDDING_NAME}: found no such tensor, required for the vocabulary's size"
        )
    table = files.tensors.get(TABLE_NAME)
    return config_from_metadata(
        files.metadata,
        vocab_size=files.tensors[EMBEDDING_NAME].shape[0],
        table_rows=table.shape[0] if table else None,
    )


def gguf_source(files: GgufFiles, spec: ModelSpec, where: str) -> TensorSource:
    """Tensors of a GGUF file by checkpoint name."""
    constants: dict[str, torch.Tensor] = {}
    if spec.ple:
        prefix = f"{TRUNK_PREFIX}layers.{spec.ple.layer_ids[0]}.ple.ple_embedding."
        for name, values in hash_constants(files.metadata).items():
            constants[prefix + name] = torch.tensor(values, dtype=torch.int64)
    return GgmlSource(NameMap(spec).places(), files.tensors, where=where, constants=constants)


def _gguf(path: Path) -> GgufFiles:
    """The last file read stays open, since geometry and weights are asked for one after the other."""
    stat = path.stat() if path.is_file() else None
    return _read_gguf(path, stat and (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=1)
def _read_gguf(path: Path, version: tuple[int, int] | None) -> GgufFiles:
    del version  # a file that was written again is another one
    return GgufFiles(path)
