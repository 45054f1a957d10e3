"""Which kind of weights a path holds: told by what is there, and opened."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import ModelParts
from engine.errors import ConfigMismatch, WeightMismatch
from engine.geometry import DRAFT_PREFIX, TRUNK_PREFIX
from engine.model_spec import ModelSpec, spec_from_config
from engine.pack.draft import DENSE_TABLE, DRAFT_DIRECTORY
from engine.pack.reader import is_pack, open_draft, open_pack
from engine.sources.ggml_names import EMBEDDING_NAME, TABLE_NAME, NameMap, Place
from engine.sources.ggml_source import GgmlSource
from engine.sources.gguf_files import GgufFiles
from engine.sources.gguf_metadata import config_from_metadata, hash_constants
from engine.sources.patched import PatchedSource
from engine.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    from engine.sources.base import TensorSource
    from engine.sources.mapped import StoredTensor

GGUF_SUFFIX = ".gguf"
_WHOLE = ModelParts()
_MULTIMODAL_PREFIX = f"{TRUNK_PREFIX}language_model."


def read_spec(path: Path, parts: ModelParts = _WHOLE) -> ModelSpec:
    """Geometry of the model at a path. Raises ConfigMismatch with key, found and required."""
    spec = _own_spec(path, parts)
    return spec if parts.mtp is None else replace(spec, num_draft_layers=1)


def open_source(path: Path, spec: ModelSpec, parts: ModelParts = _WHOLE) -> TensorSource:
    """Weights of the model at a path; spec: as read_spec gives it.

    Raises WeightMismatch for a file that cannot be read, ConfigMismatch for a part that the model has no place for.
    """
    source = _own_source(path, spec, parts)
    try:
        if parts.mtp is not None:
            source = PatchedSource(source, _draft_source(Path(parts.mtp), spec), (DRAFT_PREFIX,))
        if parts.ple_gguf is not None:
            source = _with_table(source, Path(parts.ple_gguf), spec)
    except BaseException:
        source.close()
        raise
    return source


def has_weights(path: Path) -> bool:
    """Whether there are files of weights at a path: then what cannot be read is a fault, not a bare configuration."""
    if path.suffix == GGUF_SUFFIX or is_pack(path):
        return True
    return any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))


def _own_spec(path: Path, parts: ModelParts) -> ModelSpec:
    table = None if parts.ple_gguf is None else _table(Path(parts.ple_gguf))
    if path.suffix == GGUF_SUFFIX:
        return gguf_spec(_gguf(path), path.stem, table)
    if parts.native is not None and not (path / "config.json").is_file():
        return gguf_spec(_gguf(Path(parts.native)), path.name, table)
    return ModelSpec.from_dir(path)


def _own_source(path: Path, spec: ModelSpec, parts: ModelParts) -> TensorSource:
    if path.suffix == GGUF_SUFFIX:
        return gguf_source(_gguf(path), spec, str(path))
    native = None if parts.native is None else _gguf(Path(parts.native))
    if is_pack(path):
        return open_pack(path, spec, native, with_draft=parts.mtp is None)
    if native is not None:
        raise ConfigMismatch(
            f"--native {parts.native}: found {path} beside it, required a pack that leaves tensors in this file"
        )
    return SafetensorsSource(path)


def _draft_source(directory: Path, spec: ModelSpec) -> TensorSource:
    """The draft layer in a pack, in the files that a pack has for it, or in a checkpoint."""
    for folder in (directory, directory / DRAFT_DIRECTORY):
        if (folder / DENSE_TABLE).is_file():
            return open_draft(folder, spec)
    if any(directory.glob("*.safetensors")):
        return SafetensorsSource(directory)
    raise WeightMismatch(
        f"--mtp {directory}: found no {DENSE_TABLE}, no {DRAFT_DIRECTORY}/{DENSE_TABLE} and no .safetensors file, "
        "required a draft layer's files, a pack or a checkpoint"
    )


def _with_table(source: TensorSource, file: Path, spec: ModelSpec) -> TensorSource:
    """The source with the n-gram table of a GGUF file, and the file's hash constants if it has them."""
    if spec.ple is None:
        raise ConfigMismatch(
            f"--ple-gguf {file}: found a model without n-gram embedding, required one with it"
        )
    if len(spec.ple.layer_ids) != 1:
        raise ConfigMismatch(
            f"--ple-gguf {file}: found n-gram layers {spec.ple.layer_ids}, required one"
        )
    is_multimodal = any(name.startswith(_MULTIMODAL_PREFIX) for name in source.names())
    trunk = _MULTIMODAL_PREFIX if is_multimodal else TRUNK_PREFIX
    (layer,) = spec.ple.layer_ids
    prefix = f"{trunk}layers.{layer}.ple.ple_embedding."
    table = _table(file)
    name = f"{prefix}ngram_embedding.weight"
    constants = _constants(_gguf(file, all_shards=False), prefix)
    patch = GgmlSource(
        {name: Place(name=TABLE_NAME, shape=table.shape)},
        {TABLE_NAME: table},
        where=str(file),
        constants=constants,
    )
    return PatchedSource(source, patch, (f"{prefix}ngram_embedding.", *constants))


def _table(file: Path) -> StoredTensor:
    table = _gguf(file, all_shards=False).tensors.get(TABLE_NAME)
    if table is None:
        raise WeightMismatch(f"--ple-gguf {file}: found no tensor {TABLE_NAME}, required one")
    return table


def gguf_spec(files: GgufFiles, name: str, table: StoredTensor | None = None) -> ModelSpec:
    """Geometry out of a GGUF file's metadata and the shapes that metadata leaves out.

    table: the n-gram table where it comes from another file.
    """
    return spec_from_config(gguf_config(files, table), name=name)


def gguf_config(files: GgufFiles, table: StoredTensor | None = None) -> dict[str, object]:
    """The configuration that a checkpoint of this file would have."""
    if EMBEDDING_NAME not in files.tensors:
        raise WeightMismatch(
            f"{EMBEDDING_NAME}: found no such tensor, required for the vocabulary's size"
        )
    table = table or files.tensors.get(TABLE_NAME)
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
        constants = _constants(files, prefix)
    return GgmlSource(NameMap(spec).places(), files.tensors, where=where, constants=constants)


def _constants(files: GgufFiles, prefix: str) -> dict[str, torch.Tensor]:
    """Hash constants in a file's metadata, int64, by checkpoint name."""
    found = hash_constants(files.metadata)
    return {
        prefix + name: torch.tensor(values, dtype=torch.int64) for name, values in found.items()
    }


def _gguf(path: Path, *, all_shards: bool = True) -> GgufFiles:
    """The last files read stay open, since geometry and weights are asked for one after the other."""
    stat = path.stat() if path.is_file() else None
    return _read_gguf(path, stat and (stat.st_mtime_ns, stat.st_size), all_shards)


@lru_cache(maxsize=2)
def _read_gguf(path: Path, version: tuple[int, int] | None, all_shards: bool) -> GgufFiles:
    del version  # a file that was written again is another one
    return GgufFiles(path, all_shards=all_shards)
