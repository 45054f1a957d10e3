"""Tensors of a pack as they lie in its mapped files; see engine.sources.mapped.StoredTensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import WeightMismatch
from engine.pack.index import PLANE_TYPES, IndexRow, Kind
from engine.sources import ggml_types as types
from engine.sources.base import RowCodes, StoredForm, StoredRows
from engine.sources.ggml_quants import dequantize, from_scaled
from engine.sources.mapped import BlockTensor, MappedFile, StoredTensor, code_rows

if TYPE_CHECKING:
    from engine.sources.ggml_types import GgmlType

_BLOCK_KINDS = {Kind.F32: types.F32, Kind.BF16: types.BF16, Kind.F16: types.F16}
_NARROW = {Kind.BF16_IN_F32: torch.bfloat16, Kind.F16_IN_F32: torch.float16}


def stored_tensor(row: IndexRow, file: MappedFile) -> StoredTensor:
    """The tensor of an index row."""
    if row.kind is Kind.PLANES:
        return PlaneTensor(row=row, file=file)
    if row.kind in _NARROW:
        return PromotedTensor(row=row, file=file)
    kind = types.TYPES[row.codebook] if row.kind is Kind.BLOCKS else _BLOCK_KINDS[row.kind]
    return BlockTensor(name=row.name, kind=kind, shape=row.shape, file=file, offset=row.src_off)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedTensor:
    """16-bit floats held in 32 bits. Going back rounds nothing, and a value that 16 bits cannot hold is refused."""

    row: IndexRow
    file: MappedFile

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.shape

    @property
    def form(self) -> StoredForm:
        return StoredForm(self.row.kind.name, self.row.src_bytes)

    def values(self, start: int, stop: int) -> Tensor:
        step = 4 * math.prod(self.shape[1:])
        offset = self.row.src_off + start * step
        data = self.file.bytes(offset, (stop - start) * step, self.row.name)
        shape = (stop - start, *self.shape[1:])
        wide = dequantize(types.F32, data, shape, self.row.name)
        narrow = wide.to(_NARROW[self.row.kind])
        if not torch.equal(narrow.to(torch.float32).view(torch.int32), wide.view(torch.int32)):
            raise WeightMismatch(
                f"{self.row.name}: found values that are not {narrow.dtype}, required by kind {int(self.row.kind)}"
            )
        return narrow

    def codes(self, start: int, stop: int) -> RowCodes | None:
        del start, stop
        return None

    def stored_rows(self) -> StoredRows | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneTensor:
    """Codes of all rows, then scales of all groups; fp16 scales are widened, which changes no value."""

    row: IndexRow
    file: MappedFile

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.shape

    @property
    def form(self) -> StoredForm:
        kind = PLANE_TYPES.get(self.row.plane_type)
        return StoredForm(kind.name if kind else types.I8_ROW.name, self.row.src_bytes)

    def values(self, start: int, stop: int) -> Tensor:
        row, shape = self.row, (stop - start, *self.shape[1:])
        kind = PLANE_TYPES.get(row.plane_type)
        if kind is None:
            held = self.codes(start, stop)
            assert held is not None
            return held.codes.to(torch.float32) * held.scales.unsqueeze(-1)
        if kind is types.Q2_0:
            raise WeightMismatch(f"{row.name}: found Q2_0, which the gguf library cannot read")
        bodies = self._plane(0, row.codes_bytes, start, stop).view(-1, kind.block_bytes - 2)
        return from_scaled(kind, self._scales(start, stop), bodies).view(shape)

    def codes(self, start: int, stop: int) -> RowCodes | None:
        if self.row.plane_type in PLANE_TYPES:
            return None
        codes = self._plane(0, self.row.codes_bytes, start, stop).view(torch.int8)
        shape = (stop - start, *self.shape[1:])
        return RowCodes(codes.view(shape), self._scales(start, stop).view(shape[:-1]))

    def stored_rows(self) -> StoredRows | None:
        row = self.row
        if row.plane_type in PLANE_TYPES or row.scales_fp16:
            return None
        return code_rows(self.file, row.src_off, self.shape, row.src_off + row.codes_bytes)

    def _scales(self, start: int, stop: int) -> Tensor:
        """fp32, flat."""
        data = self._plane(self.row.codes_bytes, self.row.scales_bytes, start, stop)
        kind = types.F16 if self.row.scales_fp16 else types.F32
        scales = dequantize(kind, data, (data.numel() // kind.block_bytes,), self.row.name)
        return scales.to(torch.float32)

    def _plane(self, at: int, num_bytes: int, start: int, stop: int) -> Tensor:
        """Bytes of rows [start, stop) of a plane that begins `at` bytes into the tensor."""
        step = num_bytes // self.shape[0]
        offset = self.row.src_off + at + start * step
        return self.file.bytes(offset, (stop - start) * step, self.row.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """Gate, up or down of all experts of a layer, a part of each blob."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    """[experts, rows, columns]."""
    file: MappedFile
    offset: int
    """Of the first expert's part."""
    stride: int
    """Bytes of a blob."""

    @property
    def form(self) -> StoredForm:
        return StoredForm(self.kind.name, self.shape[0] * self.kind.num_bytes(self.shape[1:]))

    def values(self, start: int, stop: int) -> Tensor:
        shape = self.shape[1:]
        if stop - start == 1:
            # Where it lies, if it is stored as floats, and without keeping the next one's bytes.
            return dequantize(self.kind, self.raw(start), shape, self.name).unsqueeze(0)
        is_float = self.kind in (types.F32, types.F16, types.BF16)
        if is_float and self.stride % self.kind.block_bytes == 0:
            return self._strided(start, stop)
        return torch.stack(
            [dequantize(self.kind, self.raw(e), shape, self.name) for e in range(start, stop)]
        )

    def _strided(self, start: int, stop: int) -> Tensor:
        """Floats of several experts where they lie, a blob apart."""
        rows, columns = self.shape[1:]
        size = self.kind.block_bytes
        num_bytes = (stop - start - 1) * self.stride + rows * columns * size
        data = self.file.bytes(self.offset + start * self.stride, num_bytes, self.name)
        flat = dequantize(self.kind, data, (num_bytes // size,), self.name)
        return flat.as_strided((stop - start, rows, columns), (self.stride // size, columns, 1))

    def codes(self, start: int, stop: int) -> RowCodes | None:
        if self.kind is not types.I8_ROW:
            return None
        rows, columns = self.shape[1:]
        num_bytes = (stop - start - 1) * self.stride + self.kind.num_bytes((rows, columns))
        data = self.file.bytes(self.offset + start * self.stride, num_bytes, self.name)
        # Where they lie: nothing of a blob is copied until somebody needs to.
        codes = data.as_strided((stop - start, rows, columns), (self.stride, columns, 1))
        scales = data.as_strided((stop - start, 4 * rows), (self.stride, 1), rows * columns)
        return RowCodes(codes.view(torch.int8), scales.contiguous().view(torch.float32))

    def stored_rows(self) -> StoredRows | None:
        return None

    def raw(self, expert: int) -> Tensor:
        """Stored bytes of one expert's part."""
        num_bytes = self.kind.num_bytes(self.shape[1:])
        return self.file.bytes(self.offset + expert * self.stride, num_bytes, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateUpPart:
    """Gate and up of all experts of a layer as one tensor, of parts that do not lie in one piece."""

    gate: ExpertPart
    up: ExpertPart

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, rows of both, columns]."""
        count, rows, columns = self.gate.shape
        return (count, 2 * rows, columns)

    @property
    def form(self) -> StoredForm:
        return StoredForm(self.gate.kind.name, self.gate.form.num_bytes + self.up.form.num_bytes)

    def values(self, start: int, stop: int) -> Tensor:
        return torch.cat((self.gate.values(start, stop), self.up.values(start, stop)), dim=1)

    def codes(self, start: int, stop: int) -> RowCodes | None:
        gate, up = self.gate.codes(start, stop), self.up.codes(start, stop)
        if gate is None or up is None:
            return None
        return RowCodes(
            torch.cat((gate.codes, up.codes), dim=1), torch.cat((gate.scales, up.scales), dim=1)
        )

    def stored_rows(self) -> StoredRows | None:
        return None
