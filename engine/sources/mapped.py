"""Files mapped into memory, and tensors that lie in them block after block."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.errors import WeightMismatch
from engine.sources import ggml_types as types
from engine.sources.base import RowCodes, StoredForm, StoredRows
from engine.sources.ggml_quants import dequantize, split_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from engine.sources.ggml_types import GgmlType


class MappedFile:
    """A whole file as bytes; pages are read when they are touched and are shared with every other reader."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                # A private mapping: nobody who writes to a tensor by mistake changes the file.
                self._map = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.num_bytes else None
                )
        except OSError as error:
            raise WeightMismatch(f"{path}: cannot be read: {error.strerror}") from error
        self.path = path

    def bytes(self, offset: int, num_bytes: int, what: str) -> Tensor:
        """uint8 [num_bytes], whose storage is no more than these bytes, so that what is held can be counted.

        Raises WeightMismatch, with `what` in front, behind the end of the file.
        """
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise WeightMismatch(
                f"{what}: found {self.path.name} of {self.num_bytes} bytes, "
                f"required at least {offset + num_bytes}"
            )
        if self._map is None or num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=num_bytes)

    def array(self, offset: int, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
        """Numbers where they lie, for whoever gathers some of them: no tensor, so nothing counts as held."""
        if self._map is None:
            return np.empty(shape, dtype)
        count = math.prod(shape)
        return np.frombuffer(self._map, dtype, offset=offset, count=count).reshape(shape)


class StoredTensor(Protocol):
    """One tensor of a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values, last axis fastest."""
        ...

    @property
    def form(self) -> StoredForm:
        """Type and bytes."""
        ...

    def values(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis: a float type as stored, else fp32."""
        ...

    def codes(self, start: int, stop: int) -> RowCodes | None:
        """Codes and scales of rows [start, stop) of the first axis; None for a type that has none."""
        ...

    def stored_rows(self) -> StoredRows | None:
        """See TensorSource."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTensor:
    """Rows of GGML blocks in one piece of a file."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    file: MappedFile
    offset: int

    @property
    def form(self) -> StoredForm:
        return StoredForm(self.kind.name, self.kind.num_bytes(self.shape))

    def raw(self) -> Tensor:
        """All stored bytes."""
        return self.file.bytes(self.offset, self.form.num_bytes, self.name)

    def values(self, start: int, stop: int) -> Tensor:
        held = self.codes(start, stop)
        if held is not None:
            return held.codes.to(torch.float32) * held.scales.unsqueeze(-1)
        part = (stop - start, *self.shape[1:])
        step = self.kind.num_bytes((1, *self.shape[1:]))
        data = self.file.bytes(self.offset + start * step, (stop - start) * step, self.name)
        return dequantize(self.kind, data, part, self.name)

    def codes(self, start: int, stop: int) -> RowCodes | None:
        if self.kind is not types.I8_ROW:
            return None
        codes, scales = split_rows(self.raw(), self.shape)
        return RowCodes(codes[start:stop], scales[start:stop])

    def stored_rows(self) -> StoredRows | None:
        if len(self.shape) != 2:
            return None
        num_rows, columns = self.shape
        if self.kind is types.I8_ROW:
            return code_rows(self.file, self.offset, self.shape, self.offset + num_rows * columns)

        def decode(data: Tensor, rows: Tensor) -> Tensor:
            return dequantize(self.kind, data.flatten(), (len(rows), columns), self.name)

        return StoredRows(
            path=self.file.path,
            offset=self.offset,
            num_rows=num_rows,
            row_bytes=self.kind.row_bytes(columns),
            decode=decode,
        )


def code_rows(
    file: MappedFile, codes_at: int, shape: tuple[int, ...], scales_at: int
) -> StoredRows:
    """int8 rows [R, C] of a file whose fp32 scales [R] lie elsewhere in it and stay mapped."""
    scales = file.array(scales_at, shape[:1], np.float32)
    return scaled_rows(file.path, codes_at, shape, lambda rows: torch.from_numpy(scales[rows]))


def scaled_rows(
    path: Path,
    codes_at: int,
    shape: tuple[int, ...],
    scales: Callable[[NDArray[np.int64]], Tensor],
) -> StoredRows:
    """int8 rows [R, C]; scales: those of some rows, [n]."""

    def decode(data: Tensor, rows: Tensor) -> Tensor:
        found = scales(rows.numpy()).to(torch.float32)
        return data.view(torch.int8).to(torch.float32) * found.unsqueeze(-1)

    return StoredRows(
        path=path, offset=codes_at, num_rows=shape[0], row_bytes=shape[1], decode=decode
    )
