"""Checkpoint tensors by name: shapes checked, int8 rows dequantised, nothing missing and nothing left over (D6).

Reads Hugging Face safetensors (one file, or shards with an index). Knows names and shapes, not layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import WeightMismatch

if TYPE_CHECKING:
    from types import TracebackType

_PREFIXES = ("model.language_model.", "model.")
_SCALE_SUFFIX = "_scale"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INDEX_FILE = "model.safetensors.index.json"
_IGNORED_PREFIXES = ("model.visual.",)


class Checkpoint:
    """Open safetensors files of one directory. Use as a context manager; `finish()` proves that all was used."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._used: set[str] = set()
        try:
            for file in _weight_files(directory):
                self._open(file)
        except BaseException:
            self._stack.close()
            raise
        self.trunk = self._find_prefix()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _open(self, file: Path) -> None:
        try:
            handle: Any = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise WeightMismatch(f"{file.name}: cannot be read: {error}") from error
        for name in handle.keys():
            if name in self._files:
                raise WeightMismatch(f"{name}: found in two files, required in one")
            self._files[name] = handle

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._files:
                return prefix
        wanted = " or ".join(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
        raise WeightMismatch(f"{self._directory}: found no embedding, required {wanted}")

    def has(self, name: str) -> bool:
        """Whether a tensor of this name exists."""
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape of a tensor. Raises WeightMismatch if there is none."""
        return tuple(self._slice(name).get_shape())

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A float tensor (fp32, bf16 or fp16 as stored; int8 rows times their scales give fp32), marked as used.

        Raises WeightMismatch with tensor, found and required.
        """
        found = self.shape(name)
        if found != shape:
            raise WeightMismatch(f"{name}: found shape {list(found)}, required {list(shape)}")
        tensor = self._read(name)
        if tensor.dtype == torch.int8:
            return _finite(name, self._dequantized(name, tensor))
        if tensor.dtype not in _FLOATS:
            raise WeightMismatch(
                f"{name}: found {tensor.dtype}, required float32, bfloat16, float16, or int8 with {name}{_SCALE_SUFFIX}"
            )
        return _finite(name, tensor)

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An int64 tensor, marked as used."""
        found = self.shape(name)
        if found != shape:
            raise WeightMismatch(f"{name}: found shape {list(found)}, required {list(shape)}")
        tensor = self._read(name)
        if tensor.dtype != torch.int64:
            raise WeightMismatch(f"{name}: found {tensor.dtype}, required int64")
        return tensor

    def finish(self, *, ignore: tuple[str, ...] = ()) -> None:
        """Raise WeightMismatch if a tensor was never taken, unless its name starts with one of `ignore`."""
        skipped = ignore + _IGNORED_PREFIXES
        left = [n for n in self._files if n not in self._used and not n.startswith(skipped)]
        if left:
            shown = ", ".join(sorted(left)[:5])
            raise WeightMismatch(
                f"{len(left)} tensors left over: found {shown}{' ...' if len(left) > 5 else ''}, "
                "required none beyond the model's own"
            )

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise WeightMismatch(f"{name}: found no such tensor, required by the model's config")
        return self._files[name].get_slice(name)

    def _read(self, name: str) -> Tensor:
        self._used.add(name)
        return self._files[name].get_tensor(name)

    def _dequantized(self, name: str, codes: Tensor) -> Tensor:
        scale_name = name + _SCALE_SUFFIX
        shape = tuple(codes.shape[:-1])
        found = self.shape(scale_name)
        if found != shape:
            raise WeightMismatch(f"{scale_name}: found shape {list(found)}, required {list(shape)}")
        scale = self._read(scale_name)
        if scale.dtype not in _FLOATS:
            raise WeightMismatch(f"{scale_name}: found {scale.dtype}, required a float type")
        return codes.to(torch.float32) * scale.to(torch.float32).unsqueeze(-1)


def _finite(name: str, tensor: Tensor) -> Tensor:
    """One value that is not a number spoils every logit, and shows only once somebody asks."""
    if not bool(torch.isfinite(tensor).all()):
        raise WeightMismatch(f"{name}: found values that are not finite, required finite ones")
    return tensor


def _weight_files(directory: Path) -> Iterator[Path]:
    index = directory / _INDEX_FILE
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightMismatch(f"{directory}: found no .safetensors file, required at least one")
        yield from files
        return
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightMismatch(f"{index.name}: not a shard index: {error!r}") from error
    for name in names:
        file = directory / name
        if file.parent != directory or not file.is_file():
            raise WeightMismatch(f"{index.name}: names {name}, required to be a file beside it")
        yield file
