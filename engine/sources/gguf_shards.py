"""GGUF files by themselves: the shards of a model, and the library's reader over one of them. No torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from engine.errors import WeightMismatch

if TYPE_CHECKING:
    from pathlib import Path

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def shard_paths(path: Path) -> list[Path]:
    """All shards of the model that a file is one of, in order. Raises WeightMismatch if one is missing."""
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


class _WholeReader(GGUFReader):
    """The library's reader slices beyond the end of a file without a word; then numpy complains of a shape."""

    # Internal in the library, with a note that it may change: if it does, numpy's words come back.
    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        required = int(offset) + int(np.dtype(dtype).itemsize) * int(count)
        if required > len(self.data):
            raise ValueError(f"found {len(self.data)} bytes, required at least {required}")
        return super()._get(offset, dtype, count, override_order)


def read_gguf(path: Path) -> GGUFReader:
    """Header and tensor list of one file. Raises WeightMismatch for a missing or broken one."""
    if not path.is_file():
        raise WeightMismatch(f"{path}: found no such file, required a GGUF file")
    try:
        return _WholeReader(path)
    # The library checks little of its own: a broken file ends in whatever numpy says of it.
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        if isinstance(error, ValueError) and GGMLQuantizationType.__name__ in str(error):
            raise WeightMismatch(
                f"{path.name}: found a tensor of a type that the gguf library does not know (Q2_0 is 42): {error}"
            ) from error
        raise WeightMismatch(f"{path.name}: not a readable GGUF file: {error}") from error
