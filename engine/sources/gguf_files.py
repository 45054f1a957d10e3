"""GGUF files, read with the gguf library: metadata and tensors of one model, from one file or all its shards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from engine.errors import WeightMismatch
from engine.sources.ggml_types import ggml_type
from engine.sources.mapped import BlockTensor, MappedFile

_TEXT_KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
"""Hundreds of thousands of strings that nobody needs beside the weights."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufFiles:
    """Metadata of the first shard, tensors of all."""

    def __init__(self, path: Path, *, with_text: bool = False) -> None:
        """path: any shard; with_text: read the tokenizer's lists too.

        Raises WeightMismatch for a file that is missing, broken, or of another model.
        """
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, BlockTensor] = {}
        paths = _shards(path)
        for number, shard in enumerate(paths):
            reader = _read(shard)
            fields: dict[str, Any] = {
                name: field.contents()
                for name, field in reader.fields.items()
                if with_text or not name.startswith(_TEXT_KEYS)
            }
            if number == 0:
                self.metadata = fields
            self._add(reader, shard)
        self._check_count(path, len(paths))

    def _add(self, reader: GGUFReader, path: Path) -> None:
        file = MappedFile(path)
        for tensor in reader.tensors:
            where = f"{path.name}: {tensor.name}"
            if tensor.name in self.tensors:
                raise WeightMismatch(f"{where}: found in two shards, required in one")
            stored = BlockTensor(
                name=tensor.name,
                kind=ggml_type(int(tensor.tensor_type), where),
                shape=tuple(int(n) for n in reversed(tensor.shape)),
                file=file,
                offset=int(tensor.data_offset),
            )
            stored.raw()
            self.tensors[tensor.name] = stored

    def _check_count(self, path: Path, num_shards: int) -> None:
        wanted = self.metadata.get("split.tensors.count")
        if wanted is not None and wanted != len(self.tensors):
            raise WeightMismatch(
                f"{path.name}: found {len(self.tensors)} tensors in {num_shards} shards, required {wanted}"
            )


def _shards(path: Path) -> list[Path]:
    match = _SHARD.search(path.name)
    if match is None:
        return [path]
    total = int(match[2])
    stem = path.name[: match.start()]
    paths = [path.with_name(f"{stem}-{i:05d}-of-{total:05d}.gguf") for i in range(1, total + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise WeightMismatch(
            f"{path.name}: found no {', '.join(missing)}, required all {total} shards in one folder"
        )
    return paths


def _read(path: Path) -> GGUFReader:
    if not path.is_file():
        raise WeightMismatch(f"{path}: found no such file, required a GGUF file")
    try:
        return GGUFReader(path)
    # The library checks little of its own: a broken file ends in whatever numpy says of it.
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise WeightMismatch(f"{path.name}: not a readable GGUF file: {error}") from error
