"""How GGML types lie in memory: values and bytes of a block, by the type number that files carry. Pure, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import WeightMismatch


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A storage type. A row of values is a whole number of blocks; rows follow one another."""

    number: int
    name: str
    block_values: int
    block_bytes: int
    row_extra_bytes: int = 0
    """Bytes behind the blocks of all rows, for each row: the scales of I8_ROW."""

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row, its share of `row_extra_bytes` included. Raises WeightMismatch for a part of a block."""
        if columns % self.block_values:
            raise WeightMismatch(
                f"{self.name}: found rows of {columns} values, required a multiple of {self.block_values}"
            )
        return columns // self.block_values * self.block_bytes + self.row_extra_bytes

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape, last axis fastest."""
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])


F32 = GgmlType(0, "F32", 1, 4)
F16 = GgmlType(1, "F16", 1, 2)
Q4_0 = GgmlType(2, "Q4_0", 32, 18)
Q5_0 = GgmlType(6, "Q5_0", 32, 22)
Q8_0 = GgmlType(8, "Q8_0", 32, 34)
Q4_K = GgmlType(12, "Q4_K", 256, 144)
Q5_K = GgmlType(13, "Q5_K", 256, 176)
Q6_K = GgmlType(14, "Q6_K", 256, 210)
IQ2_XXS = GgmlType(16, "IQ2_XXS", 256, 66)
IQ2_XS = GgmlType(17, "IQ2_XS", 256, 74)
IQ3_XXS = GgmlType(18, "IQ3_XXS", 256, 98)
IQ4_NL = GgmlType(20, "IQ4_NL", 32, 18)
IQ3_S = GgmlType(21, "IQ3_S", 256, 110)
IQ2_S = GgmlType(22, "IQ2_S", 256, 82)
IQ4_XS = GgmlType(23, "IQ4_XS", 256, 136)
BF16 = GgmlType(30, "BF16", 1, 2)
# Known by size alone: files of the reference engine carry it, the gguf library (0.19) cannot read it.
Q2_0 = GgmlType(42, "Q2_0", 64, 18)
# Of packs alone, far from GGML's numbers: int8 codes of all rows, then one fp32 scale a row.
I8_ROW = GgmlType(1000, "I8_ROW", 1, 1, row_extra_bytes=4)

TYPES = {
    t.number: t
    for t in (
        *(F32, F16, BF16, Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K),
        *(IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, Q2_0, I8_ROW),
    )
}


def ggml_type(number: int, where: str) -> GgmlType:
    """The type of a number. Raises WeightMismatch, with `where` in front, for one that is not supported."""
    found = TYPES.get(number)
    if found is None:
        known = ", ".join(f"{t.number} {t.name}" for t in TYPES.values())
        raise WeightMismatch(f"{where}: found GGML type {number}, required one of {known}")
    return found
