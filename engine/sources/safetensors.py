"""Hugging Face checkpoints: one safetensors file, or shards with an index; int8 rows and fp8 blocks dequantised.

Quantised forms, told by dtype and by the scale beside the tensor NAME:
- int8 with NAME_scale: one scale for each row of the last axis;
- fp8 (e4m3) with NAME_scale_inv: one scale for each block of 128 x 128;
- fp8 (e4m3) with one scale for the whole tensor: NAME_scale, or, for the shards of an n-gram table
  (`...ngram_embedding.shard_K.weight`), the table's `...ngram_embedding.weight_scale`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import WeightMismatch
from engine.sources.base import RowCodes, StoredForm, StoredRows
from engine.sources.mapped import MappedFile, scaled_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

FP8_BLOCK = 128
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_INDEX_FILE = "model.safetensors.index.json"
_ROW_SCALE = "_scale"
_BLOCK_SCALE = "_scale_inv"
_INT8 = "I8"
_FP8 = "F8_E4M3"
_DTYPES = {
    _INT8: torch.int8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
}
"""By the file's names; fp8 is given as fp32."""
_ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, _INT8: 1, _FP8: 1}
_SHARD = re.compile(r"\.shard_\d+\.weight$")


class SafetensorsSource:
    """See engine.sources.base.TensorSource."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        try:
            for file in _weight_files(directory):
                self._open(file)
        except BaseException:
            self._stack.close()
            raise
        self._scales = {name: scale for name in self._files if (scale := self._scale_of(name))}
        self._names = tuple(n for n in self._files if n not in set(self._scales.values()))

    @property
    def where(self) -> str:
        return str(self._directory)

    def close(self) -> None:
        self._stack.close()

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES.get(self._slice(name).get_dtype(), torch.float32)

    def get(self, name: str) -> Tensor:
        stored = self._slice(name).get_dtype()
        if stored == _INT8:
            codes = self._codes(name)
            return codes.codes.to(torch.float32) * codes.scales.to(torch.float32).unsqueeze(-1)
        if stored == _FP8:
            return self._rows_of_fp8(name, 0, self.shape(name)[0])
        return self._files[name].get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        slice_ = self._slice(name)
        stored = slice_.get_dtype()
        if stored == _INT8:
            scales = self._scale_tensor(name, self.shape(name)[:-1])[start:stop]
            return slice_[start:stop].to(torch.float32) * scales.to(torch.float32).unsqueeze(-1)
        if stored == _FP8:
            return self._rows_of_fp8(name, start, stop)
        return slice_[start:stop]

    def codes(self, name: str) -> RowCodes | None:
        return self._codes(name) if self._slice(name).get_dtype() == _INT8 else None

    def stored_rows(self, name: str) -> StoredRows | None:
        stored, shape = self._slice(name).get_dtype(), self.shape(name)
        if len(shape) != 2:
            return None
        path, offset = self._paths[name], self._offset(name)
        if stored == _INT8:
            return scaled_rows(path, offset, shape, self._mapped_scales(name))
        dtype = _DTYPES.get(stored, torch.float32)
        one = None
        if stored == _FP8:
            scale_name = self._scales.get(name)
            if scale_name is None or scale_name.endswith(_BLOCK_SCALE):
                return None
            dtype, one = torch.float8_e4m3fn, self._one_scale(name, scale_name)

        def decode(data: Tensor, rows: Tensor) -> Tensor:
            values = data.view(dtype).view(len(rows), -1)
            return values if one is None else values.to(torch.float32) * one

        return StoredRows(
            path=path,
            offset=offset,
            num_rows=shape[0],
            row_bytes=shape[1] * dtype.itemsize,
            decode=decode,
        )

    def _mapped_scales(self, name: str) -> Callable[[NDArray[np.int64]], Tensor]:
        """The row scales of an int8 tensor, gathered where they lie."""
        dtype = self._scale_tensor(name, self.shape(name)[:-1]).dtype
        scale_name = self._scales[name]
        shape = (*self.shape(scale_name), dtype.itemsize)
        mapped = MappedFile(self._paths[scale_name]).array(
            self._offset(scale_name), shape, np.uint8
        )
        return lambda rows: torch.from_numpy(mapped[rows]).view(dtype).view(-1)

    def _offset(self, name: str) -> int:
        """Where a tensor begins in its file."""
        start, entry = _header_entry(self._paths[name], name)
        return start + entry["data_offsets"][0]

    def stored(self, name: str) -> StoredForm:
        slice_ = self._slice(name)
        num_bytes = self._num_bytes(name)
        scale = self._scales.get(name)
        # The one scale of a table counts with its table only when the table is one tensor.
        if scale is not None and scale.startswith(name):
            num_bytes += self._num_bytes(scale)
        return StoredForm(slice_.get_dtype(), num_bytes)

    def _open(self, file: Path) -> None:
        try:
            handle: Any = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise WeightMismatch(f"{file.name}: cannot be read: {error}") from error
        for name in handle.keys():
            if name in self._files:
                raise WeightMismatch(f"{name}: found in two files, required in one")
            self._files[name] = handle
            self._paths[name] = file

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise WeightMismatch(f"{name}: found no such tensor, required by the model's config")
        return self._files[name].get_slice(name)

    def _num_bytes(self, name: str) -> int:
        slice_ = self._slice(name)
        size = _ELEMENT_BYTES.get(slice_.get_dtype())
        if size is None:
            known = ", ".join(_ELEMENT_BYTES)
            raise WeightMismatch(f"{name}: found {slice_.get_dtype()}, required one of {known}")
        return math.prod(slice_.get_shape()) * size

    def _scale_of(self, name: str) -> str | None:
        """The tensor that holds the scales of a quantised one, if it is there."""
        stored = self._slice(name).get_dtype()
        candidates: tuple[str, ...] = ()
        if stored == _INT8:
            candidates = (name + _ROW_SCALE,)
        elif stored == _FP8:
            table = _SHARD.sub(".weight", name)
            candidates = (name + _BLOCK_SCALE, name + _ROW_SCALE, table + _ROW_SCALE)
        return next((c for c in candidates if c in self._files), None)

    def _codes(self, name: str) -> RowCodes:
        codes = self._files[name].get_tensor(name)
        return RowCodes(codes, self._scale_tensor(name, tuple(codes.shape[:-1])))

    def _scale_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The scales of a tensor, checked. Raises WeightMismatch naming the scale tensor."""
        scale_name = self._scales.get(name, name + _ROW_SCALE)
        found = self.shape(scale_name)
        if found != shape:
            raise WeightMismatch(f"{scale_name}: found shape {list(found)}, required {list(shape)}")
        scales = self._files[scale_name].get_tensor(scale_name)
        if scales.dtype not in FLOATS:
            raise WeightMismatch(f"{scale_name}: found {scales.dtype}, required a float type")
        return scales

    def _one_scale(self, name: str, scale_name: str) -> Tensor:
        """The scale of a whole tensor, fp32. Raises WeightMismatch if there are several."""
        shape = self.shape(scale_name)
        if shape not in ((), (1,)):
            raise WeightMismatch(f"{scale_name}: found shape {list(shape)}, required [1]")
        return self._scale_tensor(name, shape).to(torch.float32)

    def _rows_of_fp8(self, name: str, start: int, stop: int) -> Tensor:
        scale_name = self._scales.get(name)
        if scale_name is None:
            raise WeightMismatch(
                f"{name}: found {_FP8} without scales, required {name}{_BLOCK_SCALE} or {name}{_ROW_SCALE}"
            )
        values = self._slice(name)[start:stop].to(torch.float32)
        if not scale_name.endswith(_BLOCK_SCALE):
            return values * self._one_scale(name, scale_name)
        shape = self.shape(name)
        if len(shape) != 2:
            raise WeightMismatch(
                f"{name}: found shape {list(shape)}, required 2 axes for {scale_name}"
            )
        blocks = tuple(-(-n // FP8_BLOCK) for n in shape)
        scales = self._scale_tensor(name, blocks).to(torch.float32)
        # Each product is one fp32 rounding, whatever the layout: the scale of a value is its block's.
        by_row = scales[torch.arange(start, stop) // FP8_BLOCK]
        return values * by_row.repeat_interleave(FP8_BLOCK, dim=1)[:, : shape[1]]


def _header_entry(path: Path, name: str) -> tuple[int, dict[str, Any]]:
    """Start of the data part of a safetensors file, and the header's entry for a tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))[name]


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
