"""GGUF files, read with the gguf library: metadata and tensors of one model, from one file or all its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import WeightMismatch
from engine.sources.ggml_types import ggml_type
from engine.sources.gguf_shards import read_gguf, shard_paths
from engine.sources.mapped import BlockTensor, MappedFile

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import GGUFReader

_TEXT_KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
"""Hundreds of thousands of strings that nobody needs beside the weights."""


class GgufFiles:
    """Metadata of the first shard, tensors of all."""

    def __init__(self, path: Path, *, with_text: bool = False, all_shards: bool = True) -> None:
        """path: any shard; with_text: read the tokenizer's lists too; all_shards: False reads this file alone.

        Raises WeightMismatch for a file that is missing, broken, or of another model.
        """
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, BlockTensor] = {}
        paths = shard_paths(path) if all_shards else [path]
        for number, shard in enumerate(paths):
            reader = read_gguf(shard)
            fields: dict[str, Any] = {
                name: field.contents()
                for name, field in reader.fields.items()
                if with_text or not name.startswith(_TEXT_KEYS)
            }
            if number == 0:
                self.metadata = fields
            self._add(reader, shard)
        if all_shards:
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
